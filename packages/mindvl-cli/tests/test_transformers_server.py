# SPDX-License-Identifier: Apache-2.0
"""The command line of transformers runs with the classes of MindVL registered; commands/test_serve.py serves a model with it."""

import subprocess
import sys


def test_it_is_the_command_line_of_transformers_with_the_table_of_its_server_extended():
    code = (
        "import sys; from mindvl_cli.transformers_server import main; sys.argv = ['transformers', 'serve', '--help']\n"
        "try: main()\n"
        "finally:\n"
        "    from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES as names\n"
        "    print(names['mindvl'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--trust-remote-code" in done.stdout
    assert done.stdout.splitlines()[-1] == "MindVLForConditionalGeneration"
