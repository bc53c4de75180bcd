# SPDX-License-Identifier: Apache-2.0
"""`transformers serve` for MindVL directories too: registers their classes, then runs the command line of transformers.

Started by server.py as its own program. transformers runs no code of the directory.
"""


def main() -> None:
    """Run the command line of transformers with the arguments of this process."""
    from transformers.cli.transformers import app

    from mindvl_model.hf.registration import register_mindvl

    register_mindvl()
    app()


if __name__ == "__main__":
    main()
