"""ChatML, the prompt format of the SmolLM2 instruct models. Plain text, no dependency."""
START, END = "<|im_start|>", "<|im_end|>"


def render_chat(messages, generate=False):
    """(role, content) pairs as ChatML text.

    `generate` appends the opening of the assistant's message, so that the model answers next.
    """
    text = "".join(f"{START}{role}\n{content}{END}\n" for role, content in messages)
    return text + f"{START}assistant\n" if generate else text


def turn_texts(agent):
    """What comes before each of the agent's answers, as ChatML: a tuple of texts.

    The first opens the context. A later one closes the answer before it, so it follows the
    generated tokens directly: context = text 0, answer, text 1, answer, and so on.
    """
    first = render_chat([("system", agent.system), ("user", agent.turns[0])], generate=True)
    later = (f"{END}\n" + render_chat([("user", turn)], generate=True) for turn in agent.turns[1:])
    return first, *later
