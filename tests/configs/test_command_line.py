"""Bad input ends with one message, exit code 2, and nothing touched."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent.parent

# Parses command lines as main.py does, many in one process; tells the exit code, whether JAX was imported, and the config.
DRIVER = """
import dataclasses, json, sys
from unittest import mock
from absl import flags
from configs import command_line
for line in sys.stdin:
    sys.argv = ["main.py", *json.loads(line)]  # where ml_collections looks for overrides
    names, config = flags.FlagValues(), None
    with mock.patch.object(flags, "FLAGS", names), mock.patch.object(command_line, "FLAGS", names):
        flags.DEFINE_string("workdir", None, "", flag_values=names)
        flags.DEFINE_enum("mode", "train", ["train"], "", flag_values=names)
        flags.DEFINE_string("prompt", None, "", flag_values=names)
        flags.DEFINE_string("topology", "", "", flag_values=names)
        try:
            holder = command_line.define_config()
            command_line.parse(sys.argv)
            code, config = 0, dataclasses.asdict(names.config)
        except SystemExit as error:
            code = error.code
    sys.stderr.flush()
    print("end", json.dumps([code, "jax" in sys.modules, config]), flush=True)
"""

START = "from configs.schema import Config, Model\ndef get_config():\n"
FILES = {
    "good.py": START + "    return Config()\n",
    "raises.py": "def get_config():\n    x = 1\n    return 1 / 0\n",
    "top.py": "x = 1\nraise RuntimeError('at the top')\n",
    "asserts.py": START + "    assert 1 == 2\n",
    "exits.py": "import sys\nsys.exit('enough')\n",
    "chained.py": START + "    try:\n        {}['a']\n    except KeyError as e:\n        raise ValueError('no a') from e\n",
    "field.py": START + "    return Config(stesp=3)\n",
    "set_later.py": START + "    config = Config()\n    config.model.n_layer = 3\n    return config\n",
    "text.py": START + "    return Config(steps='5')\n",
    "group.py": START + "    return Config(model=None)\n",
    "syntax.py": "def get_config():\n    return (\n",
    "null.py": "x = 1\0\n",
    "imports.py": "\nimport no_such_module\n",
    "without.py": "x = 1\n",
    "number.py": "get_config = 3\n",
    "aid.py": "def build():\n    sizes = {}\n    return sizes['width']\n",
    "uses_aid.py": "import aid\ndef get_config():\n    return aid.build()\n",
    "broken_aid.py": "def build(:\n",
    "uses_broken_aid.py": "import broken_aid\n",
    "dict.py": "def get_config():\n    return {}\n",
    "nothing.py": START + "    Config()\n",
    "class.py": START + "    return Config\n",
    "arguments.py": "def get_config(size):\n    return size\n",
    "needs_path.py": START + "    config = Config()\n    config.data.source = 'text'\n    return config\n",
    "good.flags": "--config=good.py\n--workdir=w\n--config.steps=77\n",
    "bad.flags": "--config=good.py\n--workdir=w\n--config.stesp=77\n",
}

# What follows --config=good.py --workdir=w, and what the answer must hold.
FIELDS_REFUSED = [
    (
        "--config.model.n_layer=4",
        "config.model.n_layer does not exist. Did you mean config.model.num_layers? There are model.",
    ),
    ("--config.stesp=4", "config.stesp does not exist. Did you mean config.steps? There are steps, seed, "),
    ("-config.stesp=4", "Did you mean config.steps?"),
    ("--config.stesp 4", "Did you mean config.steps?"),
    ("--config.learning_rate=1", "Did you mean config.optimizer.learning_rate?"),
    ("--config.batch_size=4", "Did you mean config.global_batch_size or config.evaluation.batch_size?"),
    ("--config.modle.num_layers=4", "Did you mean config.model.num_layers? There are model.num_layers, "),
    ("--config.optim.lr=4", "config.optim.lr does not exist. There are optimizer.name, optimizer.learning_rate, "),
    ("--config.zzz=4", "config.zzz does not exist. There are steps, seed, "),
    ("--config.=4", "config. does not exist. There are steps, seed, "),
    ("--config.steps.more=3", "config.steps.more does not exist."),
    ("--config.model=3", "config.model is a group of fields; set one of model.num_layers, model.embed_dim"),
    ("--config.steps=1e3", "config.steps is '1e3'; it must be of type int, as in 1000."),
    ("--config.steps=5.0", "config.steps is '5.0'; it must be of type int"),
    ("--config.steps=", "config.steps is ''; it must be of type int"),
    ("--config.steps", "Missing value for flag --config.steps"),
    ("--config.steps=-5", "config.steps is -5; it must be greater than 0."),
    ("--noconfig.steps", "--noconfig.steps: only a bool is switched off by 'no'; config.steps is of type int"),
    ("--config.mesh.data=2x", "config.mesh.data is '2x'; it must be of type int"),
    ("--config.model.qk_norm=maybe", "config.model.qk_norm is 'maybe'; it must be of type bool, as in False."),
    ("--config.model.qk_norm=2", "config.model.qk_norm is '2'; it must be of type bool"),
    ("--config.optimizer.learning_rate=fast", "is 'fast'; it must be of type float, as in 0.0003."),
    ("--config.optimizer.learning_rate=nan", "config.optimizer.learning_rate is nan; it must be a finite number."),
    ("--config.data.source=text", "config.data.path is empty; data.source='text' needs a glob"),
    (
        "--confg=3",
        "--confg is not a flag. Did you mean --config? There are --config, --mode, --prompt, --topology, --workdir, and",
    ),
    ("--steps=3", "--steps is not a flag. Did you mean --config.steps?"),
    ("--model.num_layers=3", "--model.num_layers is not a flag. Did you mean --config.model.num_layers?"),
    ("--mode=dance", "flag --mode=dance: value should be one of <train>"),
    ("more", "'more' is not a flag"),
    ("config.steps=3", "'config.steps=3' is not a flag; flags look like --config.steps=100."),
    ("--config=raises.py", "--config is given 2 times: --config=good.py, --config=raises.py. Give one."),
]

# What follows --workdir=w.
FILES_REFUSED = [
    ("", "--config is missing; give a config file"),
    ("good.py", "--config is missing"),
    ("--config=", "--config has no value; give a config file"),
    ("--config --mode=train", "--config has no value; give a config file"),
    ("--config=none.py", "--config=none.py is not a file, seen from "),
    ("--config=tiny", "configs/tiny.py? "),
    ("--config=configs/defualt.py", "configs/default.py? "),
    ("--config=w", "--config=w is not a file, seen from "),
    ("--config.steps=4 --config=good.py", "--config.steps=4 stands before --config=good.py; put it after"),
    ("--config=raises.py", "raises.py, line 3: ZeroDivisionError: division by zero"),
    ("--config=raises.py --config.steps=4", "raises.py, line 3: ZeroDivisionError: division by zero"),
    ("--config=top.py", "top.py, line 2: RuntimeError: at the top"),
    ("--config=asserts.py", "asserts.py, line 3: AssertionError: assert 1 == 2"),
    ("--config=exits.py", "exits.py, line 2: SystemExit: enough"),
    ("--config=chained.py", "chained.py, line 6: ValueError: no a"),
    (
        "--config=field.py",
        "field.py, line 3: TypeError: Config has no field 'stesp'. Did you mean steps? There are steps, ",
    ),
    ("--config=set_later.py", "set_later.py, line 4: AttributeError: Model has no field 'n_layer'. Did you mean num_layers?"),
    ("--config=text.py", "text.py: config.steps is '5' (str); it must be of type int."),
    ("--config=text.py --config.steps=4", "text.py: config.steps is '5' (str); it must be of type int."),
    ("--config=group.py", "group.py: config.model is None; it must be a configs.schema.Model."),
    ("--config=group.py --config.model.num_layers=4", "group.py: config.model is None; it must be a configs.schema.Model."),
    ("--config=syntax.py", "syntax.py, line 2: SyntaxError: '(' was never closed"),
    ("--config=null.py", "null.py: SyntaxError: source code string cannot contain null bytes"),
    ("--config=imports.py", "imports.py, line 2: ModuleNotFoundError: No module named 'no_such_module'"),
    ("--config=without.py", "without.py has no function get_config(); it must have one that returns a configs.schema.Config."),
    ("--config=number.py", "number.py has no function get_config()"),
    ("--config=uses_aid.py", "uses_aid.py, line 3: KeyError: 'width' (raised in "),
    ("--config=uses_aid.py --config.steps=4", "aid.py, line 3)"),
    ("--config=uses_broken_aid.py", "uses_broken_aid.py, line 1: SyntaxError: invalid syntax (broken_aid.py, line 1)"),
    ("--config=dict.py", "dict.py: get_config() returned a dict; it must return a configs.schema.Config."),
    ("--config=dict.py --config.steps=4", "dict.py: get_config() returned a dict"),
    ("--config=nothing.py --config.steps=4", "nothing.py: get_config() returned a NoneType"),
    ("--config=class.py", "class.py: get_config() returned the class Config"),
    ("--config=arguments.py", "arguments.py: TypeError: get_config() missing 1 required positional argument: 'size'"),
]

OTHERS_REFUSED = [
    ("--config=good.py", "--workdir is missing; give the folder to write to"),
    ("--config=good.py --workdir=", "--workdir is missing; give the folder to write to"),
    ("--config=good.py --workdir", "Missing value for flag --workdir"),
    ("--config=good.py --workdir=file", "--workdir=file cannot be a folder: "),
    ("--config=good.py --workdir=file/under/it", "--workdir=file/under/it cannot be a folder: "),
    ("--config=good.py --workdir=w --prompt=ab", "--prompt is for --mode=generate, but --mode is train"),
    ("--config=good.py --workdir=w --topology=h100:8", "--topology is for --mode=plan, but --mode is train"),
    ("--flagfile=none.flags", "Unable to open flagfile: "),
    ("--flagfile=bad.flags", "Did you mean config.steps?"),
]

REFUSED = [
    *((f"--config=good.py --workdir=w {line}", told) for line, told in FIELDS_REFUSED),
    *((f"--workdir=w {line}", told) for line, told in FILES_REFUSED),
    *OTHERS_REFUSED,
]

# The line, a field, its value.
TAKEN = [
    ("--config=good.py --workdir=w", "steps", 1000),
    ("--config good.py --workdir w --config.steps 5", "steps", 5),
    ("-config=good.py -workdir=w -config.steps=5", "steps", 5),
    ("--config=good.py --workdir=w --config.steps=5 --config.steps=6", "steps", 6),
    ("--config=good.py --workdir=new/one --config.optimizer.learning_rate=1", "optimizer.learning_rate", 1.0),
    ("--config=good.py --workdir=w --config.model.qk_norm", "model.qk_norm", True),
    ("--config=good.py --workdir=w --noconfig.model.qk_norm", "model.qk_norm", False),
    ("--config=good.py --workdir=w --config.rules.batch=fsdp,data", "rules.batch", "fsdp,data"),
    ("--config=good.py --workdir=w --config.rules.mlp=", "rules.mlp", ""),
    ("--config=needs_path.py --workdir=w --config.data.path=a/**/*.txt", "data.path", "a/**/*.txt"),
    ("--flagfile=good.flags", "steps", 77),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("run")
    for name, text in FILES.items():
        (path / name).write_text(text)
    (path / "file").write_text("kept")
    (path / "w").mkdir()
    (path / "w/metrics.jsonl").write_text('{"step": 1}\n')
    return path


def _contents(folder):
    """Of all files but the bytecode of modules that the config files import."""
    files = (p for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


@pytest.fixture(scope="module")
def answers(folder):
    """Of every command line: what was printed, the exit code, whether JAX was imported, and the config."""
    lines = [line for line, *_ in REFUSED + TAKEN]
    env = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{folder}", "PYTHONDONTWRITEBYTECODE": "1"}
    before = _contents(folder)
    run = subprocess.run(
        [sys.executable, "-c", DRIVER], input="".join(json.dumps(line.split()) + "\n" for line in lines), cwd=folder,
        env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120,
    )  # fmt: skip
    found, message = [], []
    for line in run.stdout.splitlines():
        if line.startswith("end "):
            found.append(("\n".join(message), *json.loads(line.removeprefix("end "))))
            message = []
        else:
            message.append(line)
    assert len(found) == len(lines), run.stdout
    assert _contents(folder) == before
    return dict(zip(lines, found, strict=True))


@pytest.mark.parametrize("line, told", REFUSED, ids=[line for line, _ in REFUSED])
def test_refused_in_one_message_before_jax_is_imported(answers, line, told):
    message, code, jax_imported, _ = answers[line]
    assert told in message
    assert message.startswith("meshfit: ") and len(message.splitlines()) == 1 and "Traceback" not in message
    assert code == 2 and not jax_imported


@pytest.mark.parametrize("line, field, value", TAKEN, ids=[line for line, *_ in TAKEN])
def test_taken(answers, line, field, value):
    message, code, jax_imported, config = answers[line]
    assert (message, code, jax_imported) == ("", 0, False)
    for part in field.split("."):
        config = config[part]
    assert config == value and type(config) is type(value)


def _main(*flags, **env):
    env = {k: v for k, v in os.environ.items() if k != "JAX_NUM_CPU_DEVICES"} | env
    command = [sys.executable, "main.py", *flags]
    return subprocess.run(command, cwd=ROOT, env=env, text=True, capture_output=True, timeout=120)


@pytest.mark.parametrize(
    "extra, told",
    [
        ("--config.mesh.data=4 --config.mesh.fsdp=1 --config.mesh.tensor=1",
         "The mesh data=4, fsdp=1, tensor=1 takes 4 devices, but there are 8 cpu devices"),
        ("--config.global_batch_size=10", "= 10 does not divide by 4"),
        ("--config.remat.plan=names:q,mlp_gaet", "no activation named 'mlp_gaet'. It has: block_input, q, k, v"),
        ("--num_processes=2", "--num_processes and --process_id do nothing without --coordinator_address"),
    ],
)  # fmt: skip
def test_the_command_refuses_what_does_not_fit_the_devices_and_touches_nothing(folder, extra, told):
    before = _contents(folder)
    run = _main("--config=configs/tiny.py", f"--workdir={folder}/w", *extra.split())
    assert run.returncode == 2 and run.stderr.startswith("meshfit: ") and told in run.stderr
    assert run.stderr.count("meshfit: ") == 1 and "Traceback" not in run.stderr and not run.stdout
    assert _contents(folder) == before


def test_the_command_answers_for_its_config_without_importing_jax(tmp_path):
    run = _main("--config=configs/tiny.py", f"--workdir={tmp_path}/w", "--config.steps=-5", PYTHONPROFILEIMPORTTIME="1")
    imported = {line.rpartition("|")[2].strip() for line in run.stderr.splitlines() if line.startswith("import time:")}
    message = [line for line in run.stderr.splitlines() if not line.startswith("import time:")]
    assert run.returncode == 2 and message == ["meshfit: config.steps is -5; it must be greater than 0."]
    assert "configs.command_line" in imported and not imported & {"jax", "flax", "train", "parallel.mesh"}
    assert not (tmp_path / "w").exists()


def test_the_command_cannot_read_a_flagfile(tmp_path):
    run = _main("--flagfile=none.flags")
    assert run.returncode == 2 and run.stderr.startswith("meshfit: Unable to open flagfile") and "Traceback" not in run.stderr


def test_help_lists_all_flags_and_fields():
    run = _main("--help")
    assert run.returncode == 0 and not run.stderr
    for told in ("--config: A config file", "--workdir: Folder", "--mode: ", "--process_id: ", "--config.model.num_layers=4"):
        assert f"  {told}" in run.stdout
    assert "absl" not in run.stdout
