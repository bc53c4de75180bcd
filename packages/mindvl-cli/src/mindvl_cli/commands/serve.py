# SPDX-License-Identifier: Apache-2.0
"""`mindvl serve`: start an inference server with an OpenAI-compatible API for a model directory."""

from pathlib import Path

import click

from mindvl_cli.commands.options import TRUST_REMOTE_CODE
from mindvl_cli.hub import MODEL_DIRECTORY


@click.command(epilog="Example: mindvl serve model --port 8000 -- --max-model-len 8192")
@click.argument("model", type=MODEL_DIRECTORY)
@click.argument("engine_options", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--engine", type=click.Choice(["auto", "vllm", "transformers"]), default="auto", show_default=True,
    help="Inference engine; auto: vLLM if it is installed, else the server of transformers.",
)  # fmt: skip
@click.option("--host", default="127.0.0.1", show_default=True, help="Address on which the server listens.")
@click.option(
    "--port", type=click.IntRange(1, 65535), default=8000, show_default=True, help="Port on which the server listens."
)
@TRUST_REMOTE_CODE
@click.pass_context
def serve(
    context: click.Context,
    model: Path,
    engine_options: tuple[str, ...],
    engine: str,
    host: str,
    port: int,
    trust_remote_code: bool,
) -> None:
    """Serve MODEL until a signal or Ctrl-C ends the server.

    MODEL is a model directory in the transformers layout, or the id of a model in the cache of huggingface_hub.

    The image size limits are those in the directory, for example from `mindvl search-resolution --apply`. The URL is printed
    when the server answers. Options after -- are passed to the engine. The exit code is that of the server.
    """
    from mindvl_cli.server import ServerConfig, run_server
    from mindvl_merge.adapters import model_directory_problem

    problem = model_directory_problem(model)
    if problem is not None:
        raise click.UsageError(problem)
    config = ServerConfig(
        model=model,
        engine=engine,
        host=host,
        port=port,
        trust_remote_code=trust_remote_code,
        engine_options=engine_options,
    )
    context.exit(run_server(config))
