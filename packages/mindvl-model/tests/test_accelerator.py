# SPDX-License-Identifier: Apache-2.0
"""Device setup, each case in its own process, because it patches libraries of the process."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def run(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_cuda_is_mapped_to_the_cpu_and_torch_is_otherwise_unchanged() -> None:
    run("""
        import torch
        compile_before = torch.compile
        from mindvl_model import ModelError, set_up_device
        first = set_up_device("cpu")
        assert set_up_device() is first and set_up_device("cpu") is first
        assert (first.kind, first.collective_backend) == ("cpu", "gloo")
        assert first.device(3) == torch.device("cpu")
        try:
            set_up_device("cuda")
        except ModelError as error:
            assert "'cuda' was requested, but this process is set up for 'cpu'" in str(error)
        else:
            raise AssertionError("a second kind was accepted")

        assert torch.cuda.is_available() is False
        assert torch.compile is compile_before
        assert torch.zeros(2).type() == "torch.cuda.FloatTensor"
        assert torch.zeros(2).type(torch.float64).dtype == torch.float64
        assert torch.zeros(2, device="cuda").device.type == "cpu"
        assert torch.empty(2, device=torch.device("cuda", 0), pin_memory=True).device.type == "cpu"
        assert torch.ones(1).cuda().device.type == "cpu"
        assert torch.nn.Linear(1, 1).cuda().weight.device.type == "cpu"
        with torch.device("meta"):  # transformers loads models under it
            assert {make(3).device.type for make in (torch.arange, torch.empty, torch.zeros, torch.ones)} == {"meta"}
        torch.cuda.manual_seed(5)
        state = torch.cuda.get_rng_state()
        drawn = torch.rand(1)
        torch.cuda.set_rng_state(state)
        assert torch.rand(1) == drawn
        with torch.cuda.stream(torch.cuda.current_stream()):
            torch.cuda.Event().record()
        import mindvl_ops
        from megatron.core import optimizer
        assert optimizer.Adam is mindvl_ops.AdamW
    """)


def test_megatron_is_imported_for_cuda_without_the_compiler() -> None:
    """With a CUDA build of torch, the decorators of megatron-core imported torch._inductor, and its import failed."""
    run("""
        import sys
        from mindvl_model import set_up_device
        assert set_up_device("cuda").collective_backend == "nccl"
        from megatron.core.fusions.fused_bias_swiglu import swiglu
        assert swiglu.__module__ == "megatron.core.fusions.fused_bias_swiglu"
        assert "torch._inductor" not in sys.modules
    """)


def test_importing_megatron_before_device_setup_is_refused() -> None:
    run("""
        import sys, types
        import mindvl_model
        sys.modules["megatron.core"] = types.ModuleType("megatron.core")
        try:
            mindvl_model.set_up_device()
        except mindvl_model.ModelError as error:
            assert str(error).startswith("accelerator: megatron.core was imported before the device was set up")
        else:
            raise AssertionError("the device was set up after megatron-core")
    """)


def test_importing_the_package_does_not_patch_torch() -> None:
    run("""
        import sys, torch
        before = torch.zeros, torch.Tensor.type, torch.cuda.manual_seed
        import mindvl_model
        assert before == (torch.zeros, torch.Tensor.type, torch.cuda.manual_seed)
        assert "megatron.core" not in sys.modules
        assert mindvl_model.MindVLModel.__name__ == "MindVLModel"  # its import sets up the device
        assert "megatron.core" in sys.modules
    """)


def test_another_megatron_core_is_refused_before_it_is_imported() -> None:
    run("""
        import importlib.metadata, sys
        import mindvl_model
        for version in ("0.19.0", "0.16.0", "0.16.2", "0.17.0rc1", "1", "dev"):
            importlib.metadata.version = lambda name: version
            try:
                mindvl_model.set_up_device()
            except mindvl_model.ModelError as error:
                assert str(error) == (
                    f"megatron-core: version {version} is installed, but megatron-core>=0.16.1,<0.16.2 is required. "
                    "Install it: pip install 'megatron-core>=0.16.1,<0.16.2'."
                )
            else:
                raise AssertionError(version)
        def missing(name):
            raise importlib.metadata.PackageNotFoundError(name)
        importlib.metadata.version = missing
        try:
            mindvl_model.set_up_device()
        except mindvl_model.ModelError as error:
            assert str(error).startswith("megatron-core: not installed, but megatron-core>=0.16.1,<0.16.2 is required.")
        assert "megatron.core" not in sys.modules
        importlib.metadata.version = lambda name: "0.16.1+local"
        assert mindvl_model.set_up_device("cpu").kind == "cpu"
    """)


def test_modules_that_training_does_not_use_are_imported_on_first_use() -> None:
    run("""
        import sys
        import mindvl_model, mindvl_ops
        mindvl_model.set_up_device("cpu")
        from mindvl_model.megatron import one_step
        import megatron.core.models.gpt.gpt_model, megatron.core.utils, torch
        heavy = ("sympy", "torch._dynamo", "torch.distributed.tensor", "tensorboard", "triton", "setuptools",
                 "torch.utils.cpp_extension", "megatron.core.inference.contexts")
        assert not [name for name in heavy if name in sys.modules]

        weight = torch.nn.Parameter(torch.ones(2))
        optimizer = mindvl_ops.AdamW([weight], lr=0.5, weight_decay=0.0)
        weight.grad = torch.ones(2)
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.zero_grad()
        assert torch.allclose(weight, torch.tensor(0.5)) and weight.grad is None
        held = megatron.core.utils.DTensor
        assert not isinstance(weight, held)
        assert "torch._dynamo" not in sys.modules and "torch.distributed.tensor" not in sys.modules

        from torch.distributed.tensor import DTensor
        assert isinstance(DTensor, type) and issubclass(DTensor, held)
        assert not isinstance(weight, held)
        assert torch.distributed.checkpoint._traverse.DTensor is DTensor  # compared by identity there
        from importlib.util import find_spec
        if find_spec("tensorboard"):
            from torch.utils.tensorboard import SummaryWriter
            assert isinstance(SummaryWriter, type)
        from megatron.core.inference.contexts import BaseInferenceContext, StaticInferenceContext
        assert issubclass(StaticInferenceContext, BaseInferenceContext)
        assert isinstance(megatron.core.InferenceParams(1, 8), StaticInferenceContext)
        import torch._dynamo
        optimizer.zero_grad()
        assert torch.compile(lambda x: x + 1, backend="eager")(weight).allclose(weight + 1)
    """)


def test_a_deferred_name_behaves_like_the_real_object(tmp_path: Path) -> None:
    (tmp_path / "heavy").mkdir()
    (tmp_path / "heavy" / "__init__.py").write_text(
        "import heavy.inner\n\nclass Base:\n    kind = 'base'\n\nFLAG = False\n"
    )
    (tmp_path / "heavy" / "inner.py").write_text("def double(x):\n    return 2 * x\n")
    (tmp_path / "user.py").write_text(
        "import heavy.inner\nfrom heavy import FLAG, Base\nfrom heavy.inner import double\n"
        "def f(x: Base | None) -> dict[str, Base]: ...\n"
    )
    (tmp_path / "child.py").write_text("from heavy import Base\nclass Child(Base): ...\n")
    run(f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        from mindvl_model.accelerator.deferred import DeferredName, deferred
        with deferred([("heavy",)]):
            import user
            try:
                import heavy.absent
            except ModuleNotFoundError as error:
                assert error.name == "heavy.absent"
            else:
                raise AssertionError("a module that does not exist was deferred")
        assert not any(name.startswith("heavy") for name in sys.modules)
        assert isinstance(user.Base, DeferredName) and not isinstance(3, (int.__class__, user.Base))
        assert "heavy" not in sys.modules
        assert not user.FLAG and user.double(4) == 8 and user.heavy.inner.double(4) == 8 and user.Base.kind == "base"
        import heavy
        assert isinstance(heavy.Base(), user.Base) and issubclass(heavy.Base, user.Base) and user.Base is heavy.Base
        for name in ("heavy", "heavy.inner", "user"):
            del sys.modules[name]
        with deferred([("heavy",)]):
            import user, child  # a base class is needed at once: its module is imported after all
        assert child.Child.__mro__[1] is sys.modules["heavy"].Base and isinstance(child.Child(), user.Base)
    """)
