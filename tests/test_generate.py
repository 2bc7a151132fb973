"""Samples: token by token from the model's own logits, out of the likeliest only, the same on every mesh."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import metrics
from configs.schema import Sample
from generate import choose, encode_prompt, sample_text
from input_pipeline.tokenizer import load_tokenizer
from tests import tiny

TOKENIZER = load_tokenizer("bytes")
MODEL = {"vocab_size": 264}
ONE_DEVICE = {"data": 1, "fsdp": 1, "tensor": 1}


@pytest.fixture(scope="module")
def program():
    return tiny.program(model=MODEL)


@pytest.fixture(scope="module")
def params(program):
    # Larger than at the start of training, so that the likeliest token is a clear one.
    return jax.tree.map(lambda p: 3 * p, program.init_state().params)


@pytest.fixture(scope="module")
def likeliest(program, params):
    """The likeliest token after those given, from the model's own logits."""
    length = program.config.context_length

    @jax.jit
    def logits(tokens):
        x = program.model.apply({"params": params}, tokens, tokens * 0 + np.arange(length), tokens * 0 + 1, True)
        return program.model.apply({"params": params}, x, method="logits")

    def find(ids):
        tokens = np.zeros((4, length), np.int32)
        tokens[:, : len(ids)] = ids
        with program.on_mesh():
            return int(np.argmax(logits(tokens)[0, len(ids) - 1, : TOKENIZER.size]))

    return find


def test_the_likeliest_token_one_at_a_time(program, params, likeliest):
    ids = [256, *b"ab"]
    while len(ids) < 9 and ids[1:].count(256) == 0:
        ids.append(likeliest(ids))
    expected = TOKENIZER.decode(np.array(ids[:-1] if ids[-1] == 256 else ids))
    assert sample_text(program, params, TOKENIZER, Sample(prompt="ab", length=6, temperature=0.0)) == [expected]


def test_positions_that_fill_up_change_nothing(params):
    """A context of 200 computes 128 positions, one of 16 computes 16."""
    sample = Sample(prompt="ab", length=10, temperature=0.0)
    short, long = (tiny.program(model=MODEL, context_length=length) for length in (16, 200))
    assert sample_text(short, params, TOKENIZER, sample) == sample_text(long, params, TOKENIZER, sample)


def test_a_sample_depends_on_the_seed_and_its_number_alone(program, params):
    sample = Sample(prompt="ab", length=8, temperature=1.0, count=5)
    five = sample_text(program, params, TOKENIZER, sample)
    assert len(five) == 5 and len(set(five)) > 2
    assert sample_text(program, params, TOKENIZER, dataclasses.replace(sample, count=2)) == five[:2]
    assert sample_text(program, params, TOKENIZER, dataclasses.replace(sample, seed=1)) != five
    alone = tiny.program(model=MODEL, mesh=ONE_DEVICE)
    assert sample_text(alone, jax.device_get(params), TOKENIZER, sample) == five


def test_without_a_length_the_context_is_filled_unless_the_document_ends(program, params, likeliest):
    text = sample_text(program, params, TOKENIZER, Sample(prompt="", length=0, temperature=0.0))[0]
    ids, ended = [256], False
    while len(ids) < program.config.context_length and not ended:
        ids.append(likeliest(ids))
        ended = ids[-1] == 256
    assert text == TOKENIZER.decode(np.array(ids[:-1] if ended else ids))


def test_a_sample_ends_where_a_document_begins(program, params):
    """A model whose likeliest tokens are one that the tokenizer does not have, and the one that begins a document."""
    head = jnp.zeros_like(params["head"]).at[:, 260].set(2.0).at[:, 256].set(1.0)
    scale = jnp.ones_like(params["final_norm"]["scale"])
    ending = {**params, "head": head, "embedding": jnp.abs(params["embedding"]), "final_norm": {"scale": scale}}
    ending["block"] = jax.tree.map(jnp.zeros_like, params["block"])
    assert sample_text(program, ending, TOKENIZER, Sample(prompt="ab", length=8, temperature=0.0)) == ["ab"]


def _allowed(logits, temperature, top_k, top_p):
    """The tokens that may be drawn, and their probabilities, by loops."""
    p = np.exp(logits / temperature - np.max(logits / temperature))
    order = sorted(range(len(p)), key=lambda i: -p[i])[: top_k or None]
    p = {i: p[i] / sum(p[j] for j in order) for i in order}
    kept, total = [], 0.0
    for i in order:
        if total < top_p:
            kept.append(i)
        total += p[i]
    return {i: p[i] / sum(p[j] for j in kept) for i in kept}


@pytest.mark.parametrize("temperature, top_k, top_p", [(1.0, 0, 1.0), (0.5, 0, 1.0), (1.0, 3, 1.0), (1.0, 0, 0.6),
                                                       (2.0, 4, 0.8), (1.0, 1, 1.0), (1.0, 0, 0.01),
                                                       (1.0, 99, 1.0)])  # fmt: skip
def test_tokens_are_drawn_from_the_likeliest_with_their_probabilities(temperature, top_k, top_p):
    logits = np.array([0.1, 2.0, -1.0, 1.5, 1.4, 0.0], np.float32)
    draws = 20_000
    keys = jax.random.split(jax.random.key(0), draws)
    sample = Sample(temperature=temperature, top_k=top_k, top_p=top_p)
    drawn = np.bincount(choose(jnp.broadcast_to(logits, (draws, 6)), keys, sample), minlength=6) / draws
    expected = _allowed(logits, temperature, top_k, top_p)
    assert {i for i in range(6) if drawn[i]} == set(expected)
    for i, p in expected.items():
        assert drawn[i] == pytest.approx(p, abs=0.015)


def test_ties_leave_no_more_than_top_k():
    keys = jax.random.split(jax.random.key(0), 1000)
    drawn = np.asarray(choose(jnp.zeros((1000, 5)), keys, Sample(temperature=1.0, top_k=2)))
    assert set(drawn) == {0, 1}


def test_a_prompt_of_other_bytes_than_utf8_is_taken_byte_by_byte():
    assert list(encode_prompt(TOKENIZER, "a\udcff", 16)) == [256, ord("a"), 0xFF]


def test_texts_are_printed_as_they_are(capsys):
    metrics.say_samples(["a\tb :smile: [bold]"], Sample())
    assert capsys.readouterr().out == "a\tb :smile: [bold]\n"
