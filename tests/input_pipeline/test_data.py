"""Documents, splits, tokens, windows, and the order-2 model."""

import collections
import hashlib
import math

import numpy as np
import pytest
import tokenizers

from configs.schema import Data, InputError
from input_pipeline import load_data, order2_bits_per_byte
from input_pipeline.sources import Document, is_heldout, load_documents, stdlib
from input_pipeline.tokenizer import ByteTokenizer, load_tokenizer
from input_pipeline.windows import WindowSource, tokenize
from tests import tiny

BOS = 256


def _windows(lengths, context):
    documents = [Document(str(i), bytes([i + 1]) * n) for i, n in enumerate(lengths)]
    source = WindowSource(tokenize(documents, ByteTokenizer()), BOS, context)
    return documents, [source[i] for i in range(len(source))]


@pytest.mark.parametrize("lengths", [(5,), (1,), (1, 1, 1), (3, 4, 20, 1), (4, 4), (3, 3), (7, 8, 9), (100,)])
@pytest.mark.parametrize("context", [1, 4, 8, 64])
def test_every_byte_is_a_target_once_and_bos_never(lengths, context):
    documents, windows = _windows(lengths, context)
    targets = [t for w in windows for t, weight in zip(w["targets"], w["weights"], strict=True) if weight]
    assert bytes(targets) == b"".join(d.raw for d in documents)
    assert all(len(w[name]) == context for w in windows for name in w)


def test_segments_and_positions_follow_the_documents():
    _, (first, second) = _windows((2, 3, 1), 6)
    assert list(first["inputs"]) == [BOS, 1, 1, BOS, 2, 2]
    assert list(first["targets"]) == [1, 1, BOS, 2, 2, 2]
    assert list(first["weights"]) == [1, 1, 0, 1, 1, 1]
    assert list(first["segment_ids"]) == [1, 1, 1, 2, 2, 2]
    assert list(first["positions"]) == [0, 1, 2, 0, 1, 2]
    # The second window goes on with the second document, then the third, then nothing.
    assert list(second["inputs"]) == [2, BOS, 0, 0, 0, 0]
    assert list(second["weights"]) == [0, 1, 0, 0, 0, 0]
    assert list(second["segment_ids"]) == [1, 2, 0, 0, 0, 0]
    assert list(second["positions"]) == [0, 0, 0, 0, 0, 0]


def test_windows_end_where_the_tokens_do():
    _, windows = _windows((4,), 4)
    assert len(windows) == 1
    with pytest.raises(IndexError):
        WindowSource(np.array([BOS, 1, 2]), BOS, 4)[1]


@pytest.mark.parametrize("lengths, context, windows", [((0, 0, 0, 2), 2, 2), ((1, 1), 1, 2), ((0,), 4, 0), ((), 4, 0)])
def test_windows_without_a_target_are_no_examples(lengths, context, windows):
    """Empty documents give nothing to predict, nor does a window of one token before a document's end."""
    tokens = np.array([t for n in lengths for t in [BOS] + [7] * n], np.uint16)
    source = WindowSource(tokens, BOS, context)
    assert len(source) == windows and source.num_targets == sum(lengths)
    assert all(source[i]["weights"].any() for i in range(windows))
    assert sum(source[i]["weights"].sum() for i in range(windows)) == sum(lengths)


def test_dtypes_and_every_size_of_vocabulary():
    document = [Document("a", b"abc")]
    assert tokenize(document, ByteTokenizer()).dtype == np.uint16
    window = WindowSource(tokenize(document, ByteTokenizer()), BOS, 8)[0]
    assert {k: str(v.dtype) for k, v in window.items()} == {
        "inputs": "int32", "targets": "int32", "positions": "int32", "segment_ids": "int32", "weights": "float32"
    }  # fmt: skip


def test_made_up_text_is_the_same_everywhere_and_can_be_learned():
    """A checkpoint's data must be found again on another machine, Python and NumPy."""
    train, heldout = load_documents(Data(source="synthetic"))
    digest = hashlib.sha256(b"".join(d.raw for d in train + heldout)).hexdigest()
    assert digest == "d66457d52e0c956e2c7bed26a2b8cf263ce85620cdc2e188544e35cf6c529dd9"
    assert order2_bits_per_byte((d.raw for d in train), (d.raw for d in heldout)) < 1.5


def test_the_standard_library_is_split_by_a_fixed_rule():
    names = [d.name for d in stdlib(Data())]
    assert "json/__init__.py" in names and not any("site-packages" in n for n in names)
    assert all(d.raw.decode() is not None for d in stdlib(Data())), "a tokenizer of text must be able to read all"
    train, heldout = load_documents(Data())
    assert not {d.name for d in train} & {d.name for d in heldout}
    assert len(train) + len(heldout) == len({d.name for d in stdlib(Data()) if d.raw})
    assert [d.name for d in train] == sorted(d.name for d in train)


def test_the_rule_depends_on_the_name_alone():
    """What it says today it must say tomorrow, or held-out text would turn up in training."""
    assert [i for i in range(200) if is_heldout(f"{i}.py", 2.0)] == [109, 184]


def test_text_files_by_glob(tmp_path):
    for i in range(60):
        (tmp_path / f"{i % 3}").mkdir(exist_ok=True)
        (tmp_path / f"{i % 3}/{i}.txt").write_text(f"text {i}")
    (tmp_path / "0/empty.txt").touch()
    data = Data(source="text", path=f"{tmp_path}/**/*.txt", heldout_percent=20.0)
    train, heldout = load_documents(data)
    assert len(train) + len(heldout) == 60
    assert Document("1/1.txt", b"text 1") in train + heldout
    with pytest.raises(InputError, match=r"matches no file"):
        load_documents(Data(source="text", path=f"{tmp_path}/*.md"))
    with pytest.raises(InputError, match=r"has 2 documents .* 0 are held out"):
        load_documents(Data(source="text", path=f"{tmp_path}/2/[58].txt", heldout_percent=0.1))


def _text_files(folder, names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return load_documents(Data(source="text", path=f"{folder}/**/*.txt", heldout_percent=30.0))


def test_moving_or_adding_files_leaves_the_others_where_they_are(tmp_path):
    names = [f"a/{i}.txt" for i in range(20)]
    _, first = _text_files(tmp_path / "first", names)
    _, moved = _text_files(tmp_path / "second/deeper", names)
    assert first == moved
    _, more = _text_files(tmp_path / "first", [f"b/{i}.txt" for i in range(20)])
    assert {d.name for d in more if d.name.startswith("a/")} == {d.name for d in first}


def test_a_file_that_cannot_be_read_is_told(tmp_path):
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"gone.txt cannot be read: No such file"):
        _text_files(tmp_path, ["a.txt"])


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, special_tokens=["<s>"], initial_alphabet=alphabet)
    made.train_from_iterator(["the cat sat on the mat, the dog did not, " * 20], trainer)
    made.save(str(path / "tokenizer.json"))
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(path / "without_bos.json"))
    (path / "broken.json").write_text("{")
    return path / "tokenizer.json"


def test_a_hugging_face_tokenizer(tokenizer_file):
    tokenizer = load_tokenizer(str(tokenizer_file))
    ids = tokenizer.encode("the cat, où".encode())
    assert len(ids) < len("the cat, où".encode()) and tokenizer.bos_id not in ids
    assert tokenizer.decode(ids) == "the cat, où"
    assert tokenizer.size > 256 and max(ids) < tokenizer.size
    with pytest.raises(InputError, match=r"a.txt is not UTF-8: byte 1 is 0xff"):
        tokenize([Document("a.txt", b"x\xff")], tokenizer)


def test_a_document_may_spell_out_the_first_token(tokenizer_file):
    """It is text there: the token itself would cut the document in two."""
    tokenizer = load_tokenizer(str(tokenizer_file))
    ids = tokenizer.encode(b"a <s> b")
    assert tokenizer.bos_id not in ids and tokenizer.decode(ids) == "a <s> b"
    assert tokenizer.decode(np.array([tokenizer.bos_id, *ids, tokenizer.size])) == "a <s> b"


def test_the_first_token_is_never_decoded_not_even_where_it_is_an_ordinary_word(tmp_path):
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "a": 1, "b": 2}, unk_token="a"))
    made.save(str(tmp_path / "words.json"))
    assert load_tokenizer(str(tmp_path / "words.json")).decode(np.array([0, 1, 2])) == "a b"
    assert ByteTokenizer().decode(np.array([BOS, 104, 105, 300])) == "hi"


def test_a_tokenizer_file_cannot_cut_or_fill_up_documents(tokenizer_file):
    made = tokenizers.Tokenizer.from_file(str(tokenizer_file))
    made.enable_truncation(4)
    made.enable_padding(length=4)
    path = tokenizer_file.with_name("cutting.json")
    made.save(str(path))
    tokenizer = load_tokenizer(str(path))
    assert tokenizer.decode(tokenizer.encode(b"the dog on the mat")) == "the dog on the mat"
    assert len(tokenizer.encode(b"x")) == 1


def test_a_tokenizer_without_tokens_for_the_held_out_text_is_refused(tmp_path):
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "a": 1}, unk_token="<s>"))
    made.normalizer = tokenizers.normalizers.Replace(tokenizers.Regex("."), "")
    made.save(str(tmp_path / "deaf.json"))
    with pytest.raises(InputError, match=r"makes no token of the \d+ held-out documents"):
        load_data(tiny.config(data={"source": "synthetic", "tokenizer": str(tmp_path / "deaf.json")}))


def test_bytes_and_tokens_count_the_same_bytes(tokenizer_file):
    """Bits per byte must not depend on the tokenizer: bytes per token times tokens are the held-out bytes."""
    for spec in ("bytes", str(tokenizer_file)):
        data = load_data(tiny.config(data={"source": "synthetic", "tokenizer": spec}, model={"vocab_size": 512}))
        tokens = sum(data.heldout[i]["weights"].sum() for i in range(len(data.heldout)))
        np.testing.assert_allclose(data.heldout_bytes_per_token * tokens, sum(len(d.raw) for d in data.heldout_documents))


@pytest.mark.parametrize("name, told", [("none.json", "cannot be read"), ("broken.json", "cannot be read"),
                                        ("without_bos.json", "no token to begin a document")])  # fmt: skip
def test_unusable_tokenizers_are_refused(tokenizer_file, name, told):
    with pytest.raises(InputError, match=told):
        load_tokenizer(str(tokenizer_file.with_name(name)))


def test_a_vocabulary_smaller_than_the_tokenizer_is_refused():
    with pytest.raises(InputError, match=r"vocab_size is 256.* must be at least 257"):
        load_data(tiny.config(data={"source": "synthetic"}, model={"vocab_size": 256}))


def test_the_fingerprint_tells_data_apart():
    config = tiny.config(data={"source": "synthetic"}, model={"vocab_size": 320})
    first, same = load_data(config).fingerprint, load_data(config).fingerprint
    other = load_data(tiny.config(data={"source": "synthetic", "heldout_percent": 5.0}, model={"vocab_size": 320})).fingerprint
    assert first == same and first != other


def test_the_fingerprint_sees_a_single_changed_byte(tmp_path):
    def fingerprint():
        path = f"{tmp_path}/*.txt"
        return load_data(tiny.config(data={"source": "text", "path": path}, model={"vocab_size": 320})).fingerprint

    for i in range(200):
        (tmp_path / f"{i}.txt").write_text(f"text {i:03}")
    before = fingerprint()
    (tmp_path / "7.txt").write_text("text 008")
    after = fingerprint()
    assert {k for k in before if before[k] != after[k]} == {"sha256"}


def test_order_2_model_against_dictionaries():
    # A document of zeros has the context that every document begins with.
    train, heldout = [b"abracadabra", b"abc", b"\0\0\0b"], [b"abba", b"c", b"\0\0"]
    counts: collections.Counter = collections.Counter()
    contexts: collections.Counter = collections.Counter()
    for raw in train:
        for a, b, c in zip(b"\0\0" + raw, b"\0" + raw, raw, strict=False):
            counts[a, b, c] += 1
            contexts[a, b] += 1
    bits = [
        -math.log2((counts[a, b, c] + 1) / (contexts[a, b] + 256))
        for raw in heldout
        for a, b, c in zip(b"\0\0" + raw, b"\0" + raw, raw, strict=False)
    ]
    assert order2_bits_per_byte(train, heldout) == pytest.approx(sum(bits) / len(bits))
