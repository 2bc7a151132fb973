"""Every refusal names the field, what was given and what is allowed."""

import dataclasses
import importlib
import math
import pathlib

import jax
import pytest

from configs import schema
from configs.command_line import NOT_CONFIGS
from configs.schema import Config, InputError, Mesh, Model, field_names
from configs.validation import validate, validate_on_mesh
from parallel.mesh import make_mesh
from program import Program

FILES = sorted(p.stem for p in pathlib.Path(schema.__file__).parent.glob("*.py") if p.stem not in NOT_CONFIGS)


def _with(**fields) -> Config:
    """The default config with `group__field` set, unchecked."""
    config = Config()
    for name, value in fields.items():
        *groups, leaf = name.split("__")
        node = config
        for group in groups:
            node = getattr(node, group)
        setattr(node, leaf, value)
    return config


@pytest.mark.parametrize(
    "fields, told",
    [
        ({"steps": "5"}, r"config.steps is '5' \(str\); it must be of type int"),
        ({"steps": True}, r"config.steps is True \(bool\)"),
        ({"steps": 5.0}, r"config.steps is 5.0 \(float\)"),
        ({"model__qk_norm": 1}, r"config.model.qk_norm is 1 \(int\); it must be of type bool"),
        ({"model": {}}, r"config.model is {}; it must be a configs.schema.Model"),
        ({"optimizer__learning_rate": math.nan}, "must be a finite number"),
        ({"steps": 0}, "config.steps is 0; it must be greater than 0"),
        ({"global_batch_size": -4}, "config.global_batch_size is -4; it must be greater than 0"),
        ({"seed": -1}, "config.seed is -1; it must be 0 or greater"),
        ({"seed": 2**32}, "must be less than"),
        ({"model__dropout_rate": 1.0}, "at least 0 and below 1"),
        ({"optimizer__final_learning_rate_fraction": 1.5}, "between 0 and 1"),
        ({"data__heldout_percent": 0.0}, "above 0 and below 100"),
        ({"model__activation": "relu"}, "config.model.activation is 'relu'; it must be one of swiglu, geglu, gelu"),
        ({"model__compute_dtype": "fp8"}, "must be one of float32, bfloat16"),
        ({"data__source": "web"}, "must be one of stdlib, text, synthetic"),
        ({"data__source": "text"}, "config.data.path is empty"),
        ({"model__attention_kernel": "flash"}, "must be one of auto, splash, cudnn, xla"),
        ({"model__sliding_window": -1}, "config.model.sliding_window is -1; it must be 0 or greater"),
        ({"optimizer__name": "adam"}, "must be one of adamw, adafactor, muon"),
        ({"optimizer__schedule": "step"}, "must be one of cosine, linear, wsd"),
        ({"optimizer__decay_fraction": 0.0}, "decay_fraction is 0.0; it must be above 0 and at most 1"),
        ({"sample__top_p": 0.0}, "config.sample.top_p is 0.0; it must be above 0 and at most 1"),
        ({"sample__top_p": 1.1}, "above 0 and at most 1"),
        ({"sample__top_k": -1}, "config.sample.top_k is -1; it must be 0 or greater"),
        ({"sample__count": 0}, "config.sample.count is 0; it must be greater than 0"),
        ({"profile__steps": (5,)}, r"config.profile.steps is \(5,\); it must be the first and the last step to profile"),
        ({"profile__steps": (5, 4)}, "the first and the last step"),
        ({"profile__steps": [0, 4]}, "the first and the last step"),
        ({"profile__steps": (1, True)}, "the first and the last step"),
        ({"profile__steps": 5}, r"config.profile.steps is 5 \(int\); it must be of type tuple"),
        ({"model__num_heads": 5}, "num_heads is 5 and num_kv_heads 2"),
        ({"model__head_dim": 5}, "head_dim is 5; rotary"),
        ({"gradient_accumulation": 3}, "global_batch_size is 16 and gradient_accumulation 3"),
        ({"mesh__data": -1}, "only one axis may be -1"),
        ({"mesh__data": 0}, "config.mesh.data is 0; it must be greater than 0, or -1"),
        ({"mesh__data": -2}, "config.mesh.data is -2"),
        ({"rules__mlp": "tensr"}, "config.rules.mlp is 'tensr'; it must name mesh axes out of data, fsdp, tensor"),
        ({"rules__batch": "data,data"}, "each at most once"),
        ({"remat__plan": "some"}, "must be 'auto', 'full', 'none', 'names:a,b,c' or the path of a plan.json"),
        ({"remat__plan": "names:"}, "must be 'auto', 'full', 'none', 'names:a,b,c' or the path of a plan.json"),
        ({"remat__plan": "names:q,,v"}, "must be 'auto', 'full', 'none', 'names:a,b,c' or the path of a plan.json"),
    ],
)
def test_refusals(fields, told):
    with pytest.raises(InputError, match=told):
        validate(_with(**fields))


def test_a_config_of_another_kind_is_refused():
    with pytest.raises(InputError, match=r"get_config\(\) returned a dict; it must return a configs.schema.Config"):
        validate({"steps": 3})


def test_a_whole_number_will_do_for_a_float():
    config = _with(optimizer__learning_rate=1)
    validate(config)
    assert config.optimizer.learning_rate == 1.0 and isinstance(config.optimizer.learning_rate, float)


@pytest.mark.parametrize(
    "fields, sizes, told",
    [
        ({"global_batch_size": 12}, (8, 1, 1), r"gradient_accumulation = 12 does not divide by 8 \(batch is split over data=8"),
        (
            {"model__num_heads": 6},
            (1, 2, 4),
            r"config.model.num_heads = 6 does not divide by 4 \(heads is split over tensor=4\)",
        ),
        ({"model__vocab_size": 321}, (1, 1, 2), "config.model.vocab_size = 321 does not divide by 2"),
        ({}, (1, 1, 4), "config.model.num_kv_heads = 2 does not divide by 4"),
        ({"model__embed_dim": 100}, (1, 8, 1), "config.model.embed_dim = 100 does not divide by 8"),
        ({"evaluation__batch_size": 3}, (2, 1, 1), "config.evaluation.batch_size = 3 does not divide by 2"),
    ],
)
def test_sizes_that_do_not_divide(fields, sizes, told):
    config = _with(**fields)
    validate(config)
    with pytest.raises(InputError, match=told):
        validate_on_mesh(config, dict(zip(("data", "fsdp", "tensor"), sizes, strict=True)))


def test_all_sizes_that_do_not_divide_are_told_at_once():
    with pytest.raises(InputError) as error:
        validate_on_mesh(_with(global_batch_size=12, model__num_heads=6), {"data": 2, "fsdp": 4, "tensor": 4})
    assert all(text in str(error.value) for text in ("= 12", "num_heads = 6", "num_kv_heads = 2", "data=2, fsdp=4, tensor=4"))


@pytest.mark.parametrize("name", FILES)
def test_config_files_are_valid_and_say_how_to_run_them(name):
    module = importlib.import_module(f"configs.{name}")
    validate(module.get_config())
    assert f"python main.py --config=configs/{name}.py" in module.__doc__


PARAMETERS = {
    "decoder_125m": 109_529_856,
    "decoder_750m": 886_114_304,
    "decoder_8b": 8_030_261_248,
    "decoder_70b": 70_553_706_496,
    "decoder_405b": 405_853_388_800,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_published_shapes_have_their_number_of_parameters(name):
    config = importlib.import_module(f"configs.{name}").get_config()
    config.mesh = Mesh()  # on the devices that there are; those of the 405B config are a pod
    config.global_batch_size = 8
    state = Program(config, make_mesh(config)).abstract_state
    assert sum(math.prod(p.shape) for p in jax.tree.leaves(state.params)) == PARAMETERS[name]


def test_every_field_has_a_name_of_its_own_path():
    names = field_names(Config())
    assert len(names) == len(set(names)) and "model.num_layers" in names and "steps" in names
    assert {f.name for f in dataclasses.fields(Model)} == {n.split(".")[1] for n in names if n.startswith("model.")}
    assert {"mesh.data", "mesh.fsdp", "mesh.tensor"} <= set(names) and dataclasses.is_dataclass(Mesh)


def test_a_misspelt_field_cannot_be_set_in_a_config_file_either():
    config = Config()
    for node, name in ((config, "stesp"), (config.model, "n_layer")):
        with pytest.raises(AttributeError):
            setattr(node, name, 3)
