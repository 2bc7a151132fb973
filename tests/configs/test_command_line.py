"""Bad input ends with one message, exit code 2, and nothing touched."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent.parent

# Parses a command line as main.py does, many times in one process, and tells whether JAX was imported.
DRIVER = """
import json, sys
from unittest import mock
from absl import flags
from configs import command_line
for line in sys.stdin:
    sys.argv = ["main.py", *json.loads(line)]  # where ml_collections looks for overrides
    sys.modules.pop("config_config", None)  # the config file before this one
    names = flags.FlagValues()
    with mock.patch.object(flags, "FLAGS", names), mock.patch.object(command_line, "FLAGS", names):
        flags.DEFINE_string("workdir", None, "", flag_values=names)
        flags.DEFINE_enum("mode", "train", ["train"], "", flag_values=names)
        command_line.config_flags.DEFINE_config_file("config", None, "", flag_values=names)
        try:
            command_line.parse(sys.argv)
            code = 0
        except SystemExit as error:
            code = error.code
    sys.stderr.flush()
    print("rc", code, "jax" in sys.modules, flush=True)
"""

FILES = {
    "good.py": "from configs.schema import Config\ndef get_config():\n    return Config()\n",
    "raises.py": "def get_config():\n    x = 1\n    return 1 / 0\n",
    "top.py": "x = 1\nraise RuntimeError('at the top')\n",
    "field.py": "from configs.schema import Config\ndef get_config():\n    return Config(stesp=3)\n",
    "syntax.py": "def get_config():\n    return (\n",
    "imports.py": "\nimport no_such_module\n",
    "without.py": "x = 1\n",
    "helper.py": "import textwrap\ndef get_config():\n    return textwrap.indent(3, 4)\n",
    "dict.py": "def get_config():\n    return {}\n",
    "arguments.py": "def get_config(size):\n    return size\n",
}

REFUSED = [
    ("--config=good.py --workdir=w --config.model.n_layer=4", "n_layer does not exist. Did you mean config.model.num_layers?"),
    ("--config=good.py --workdir=w --config.stesp=4", "Did you mean config.steps?"),
    ("--config=good.py --workdir=w --config.model=3", "config.model is a group of fields; set one of model.num_layers"),
    ("--config=good.py --workdir=w --config.steps.more=3", "config.steps.more does not exist"),
    ("--config=good.py --workdir=w --config.steps=1e3", "config.steps is '1e3'; it must be of type int, as in 1000"),
    ("--config=good.py --workdir=w --config.mesh.data=2x", "config.mesh.data is '2x'; it must be of type int"),
    ("--config=good.py --workdir=w --config.model.qk_norm=maybe", "config.model.qk_norm is 'maybe'; it must be of type bool"),
    ("--config=good.py --workdir=w --config.optimizer.learning_rate=fast", "must be of type float"),
    ("--config=good.py --workdir=w --config.steps=-5", "config.steps is -5; it must be greater than 0"),
    ("--config=good.py --workdir=w --config.steps", "Missing value for flag --config.steps"),
    ("--config=good.py --workdir=w --confg=3", "Unknown command line flag 'confg'"),
    ("--config=good.py --workdir=w --mode=dance", "flag --mode=dance: value should be one of <train>"),
    ("--config=good.py --workdir=w more", "'more' is not a flag"),
    ("--config.steps=4 --config=good.py --workdir=w", "Found --config.steps=4 in argv before a value for --config"),
    ("--config=good.py", "--workdir is missing"),
    ("--config=good.py --workdir=file", "--workdir=file is a file"),
    ("--workdir=w", "--config is missing; give a config file, such as one of configs/"),
    ("--config=none.py --workdir=w", "--config=none.py is not a file here"),
    ("--config --workdir=w", "is not a file here"),
    ("--config=raises.py --workdir=w", "raises.py, line 3: ZeroDivisionError: division by zero"),
    ("--config=top.py --workdir=w", "top.py, line 2: RuntimeError: at the top"),
    ("--config=field.py --workdir=w", "field.py, line 3: TypeError: Config.__init__() got an unexpected keyword"),
    ("--config=syntax.py --workdir=w", "syntax.py, line 2: SyntaxError: '(' was never closed"),
    ("--config=imports.py --workdir=w", "imports.py, line 2: ModuleNotFoundError: No module named 'no_such_module'"),
    ("--config=without.py --workdir=w", "without.py has no get_config()"),
    ("--config=helper.py --workdir=w", "helper.py, line 3: "),
    ("--config=dict.py --workdir=w", "get_config() returned a dict; it must return a configs.schema.Config"),
    ("--config=arguments.py --workdir=w", "get_config() missing 1 required positional argument: 'size'"),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("run")
    for name, text in FILES.items():
        (path / name).write_text(text)
    (path / "file").write_text("kept")
    (path / "w").mkdir()
    (path / "w/metrics.jsonl").write_text('{"step": 1}\n')
    return path


@pytest.fixture(scope="module")
def answers(folder):
    """Of every refused command line: the message, the exit code, and whether JAX was imported."""
    import json

    env = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, "-c", DRIVER], input="".join(json.dumps(line.split()) + "\n" for line, _ in REFUSED), cwd=folder,
        env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120,
    )  # fmt: skip
    found, message = [], []
    for line in run.stdout.splitlines():
        if line.startswith("rc "):
            found.append(("\n".join(message), line))
            message = []
        else:
            message.append(line)
    assert len(found) == len(REFUSED), run.stdout
    return dict(zip((line for line, _ in REFUSED), found, strict=True))


@pytest.mark.parametrize("line, told", REFUSED)
def test_refused_in_one_message_before_jax_is_imported(answers, line, told):
    message, end = answers[line]
    assert told in message
    assert message.startswith("meshfit: ") and len(message.splitlines()) == 1 and "Traceback" not in message
    assert end == "rc 2 False"


def test_nothing_was_touched(answers, folder):
    assert (folder / "file").read_text() == "kept"
    assert [p.name for p in (folder / "w").iterdir()] == ["metrics.jsonl"]
    assert (folder / "w/metrics.jsonl").read_text() == '{"step": 1}\n'


@pytest.mark.parametrize(
    "extra, told",
    [
        (["--config.steps=-5"], "config.steps is -5"),
        (["--config.mesh.data=4", "--config.mesh.fsdp=1", "--config.mesh.tensor=1"],
         "The mesh data=4, fsdp=1, tensor=1 takes 4 devices, but there are 8 cpu devices"),
        (["--config.global_batch_size=10"], "= 10 does not divide by 4"),
        (["--config.remat.plan=names:q,mlp_gaet"], "no activation named 'mlp_gaet'. It has: block_input, q, k, v"),
    ],
)  # fmt: skip
def test_the_command_itself(tmp_path, extra, told):
    env = {k: v for k, v in os.environ.items() if k != "JAX_NUM_CPU_DEVICES"}
    command = [sys.executable, "main.py", "--config=configs/tiny.py", f"--workdir={tmp_path}/w", *extra]
    run = subprocess.run(command, cwd=ROOT, env=env, text=True, capture_output=True, timeout=120)
    assert run.returncode == 2
    assert told in run.stderr and run.stderr.startswith("meshfit: ") and "Traceback" not in run.stderr
    assert not (tmp_path / "w").exists()


def test_help_lists_flags_and_fields():
    run = subprocess.run([sys.executable, "main.py", "--help"], cwd=ROOT, text=True, capture_output=True, timeout=60)
    assert run.returncode == 0
    assert "--workdir" in run.stdout and "--mode" in run.stdout and "--config.model.num_layers=4" in run.stdout
