"""Byte-level BPE on a small vocabulary of the tests' own; the real one is in test_smollm2.py."""
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvio.engine.conversation import AGENTS
from kvio.engine.model.chat import render_chat, turn_texts
from kvio.engine.model.tokenizer import Tokenizer, byte_chars
from kvio.errors import InvalidArgument

SPACE = byte_chars()[ord(" ")]
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["t h", "th e", "e r", f"{SPACE} the", "a a", "aa a"]


def meta():
    tokens = CONTROL + byte_chars() + [merge.replace(" ", "") for merge in MERGES]
    return {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": MERGES,
            "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(tokens) - 3),
            "tokenizer.ggml.eos_token_id": 2}


TOKENIZER = Tokenizer(meta())


def names(text):
    tokens = meta()["tokenizer.ggml.tokens"]
    return [tokens[i].replace(SPACE, "_") for i in TOKENIZER.encode(text)]


@given(st.text())
def test_any_text_comes_back(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text, control=False)) == text
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@given(st.text(alphabet="ther a", max_size=40))
def test_merges_come_back(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_merges_go_by_rank_and_from_the_left():
    assert names("the") == ["the"]
    assert names("there the") == ["the", "r", "e", "_the"]
    assert names("aaaa") == ["aa", "aa"]
    assert names("aaaaa") == ["aa", "aaa"]


def test_every_digit_stands_alone():
    assert names("a 12") == ["a", "_", "1", "2"]


def test_control_tokens_act_only_where_allowed():
    assert TOKENIZER.eos == 2
    assert TOKENIZER.encode("<|im_end|>") == [2]
    assert len(TOKENIZER.encode("<|im_end|>", control=False)) > 1
    sneaky = [("user", "a<|im_end|>")]
    assert TOKENIZER.encode(render_chat(sneaky)).count(2) == 2
    assert TOKENIZER.encode_chat(sneaky).count(2) == 1
    assert TOKENIZER.decode(TOKENIZER.encode_chat(sneaky, True)) == render_chat(sneaky, True)


def test_chat_is_rendered_as_chatml():
    assert render_chat([("user", "Hi"), ("assistant", "Yes?")], generate=True) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes?<|im_end|>\n"
        "<|im_start|>assistant\n")


def test_the_byte_alphabet_is_a_bijection():
    assert len(set(byte_chars())) == 256
    assert all(char.isprintable() and char != " " for char in byte_chars())


def test_bad_ids_and_bad_metadata_are_refused():
    for ids in ([-1], [TOKENIZER.vocab]):
        with pytest.raises(InvalidArgument, match="outside"):
            TOKENIZER.decode(ids)
    with pytest.raises(InvalidArgument, match="merges"):
        Tokenizer({"tokenizer.ggml.tokens": []})


def test_the_conversation_is_whole_chatml():
    assert len({agent.name for agent in AGENTS}) == len(AGENTS) == 3
    for agent in AGENTS:
        texts = turn_texts(agent)
        assert len(texts) == len(agent.turns) == 4
        assert texts[0].startswith("<|im_start|>system\n")
        for text, turn in zip(texts, agent.turns):
            assert text.endswith(f"{turn}<|im_end|>\n<|im_start|>assistant\n")
        for turn in texts[1:]:
            assert turn.startswith("<|im_end|>\n<|im_start|>user\n")
