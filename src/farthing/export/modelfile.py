"""The `Modelfile` of Ollama beside a GGUF file: its template in Go's language, and where an answer
ends.

Ollama does not read the template of transformers. What stands around each message is found by
rendering small chats, put together again in Go's language, and kept only where it gives the same
text as the tokenizer's template for chats that it was not made of; else nothing is written of it,
and that is said.
"""

from __future__ import annotations

from typing import Any, NamedTuple

SYSTEM, USER, ANSWER = "SYSTEMWORDS", "USERWORDS", "ANSWERWORDS"


class Around(NamedTuple):
    """What stands before and behind each message of a chat, and before an answer that is yet to be
    written.
    """

    system: tuple[str, str]
    user: tuple[str, str]
    answer: tuple[str, str]
    opening: str
    beginning: str = ""

    def render(self, messages: list[dict[str, str]]) -> str:
        """As Ollama does it."""
        of = {"system": self.system, "user": self.user, "assistant": self.answer}
        parts = [of[each["role"]][0] + each["content"] + of[each["role"]][1] for each in messages]
        return self.beginning + "".join(parts) + self.opening


def modelfile(tokenizer: Any, generation: Any, *, is_chat: bool = True) -> tuple[str, list[str]]:
    """(the text of the file, what is to be said); `is_chat`: it was trained on chats, not on texts
    as they are.
    """
    lines, notes = ["FROM ./model.gguf"], []
    if tokenizer.chat_template is None or not is_chat:
        lines.append('TEMPLATE """{{ .Prompt }}"""')
    elif (around := _found(tokenizer)) is not None:
        lines.append(f'TEMPLATE """{_in_go(around)}"""')
    else:
        notes.append(
            "the chat template can't be said in Ollama's language: the Modelfile has none, Ollama"
            " guesses"
        )
    ends = [tokenizer.eos_token_id]
    if generation is not None:
        named = generation.eos_token_id
        ends += named if isinstance(named, list) else [named]
    texts = [
        tokenizer.convert_ids_to_tokens(each) for each in dict.fromkeys(ends) if each is not None
    ]
    lines += [f'PARAMETER stop "{text}"' for text in texts if text and '"' not in text]
    return "\n".join(lines) + "\n", notes


def _render(tokenizer: Any, messages: list[dict[str, str]], opens: bool = True) -> str:
    text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=opens))
    begins = tokenizer.bos_token or ""
    return text.removeprefix(begins) if begins else text


def _chat(*words: str) -> list[dict[str, str]]:
    """A system message where there is a fourth word first; then user and assistant in turn."""
    roles = ["user", "assistant"] * len(words)
    return [{"role": role, "content": word} for role, word in zip(roles, words, strict=False)]


def _found(tokenizer: Any) -> Around | None:
    """What stands around messages, None where the template is not of that kind."""
    try:
        one = _render(tokenizer, _chat(USER))
        before, after = one.split(USER)
        more = _render(tokenizer, _chat(USER, ANSWER, "AGAIN"))
        _, rest = more.split(USER)
        to_answer, between = rest.split(ANSWER)
        between, opening = between.split("AGAIN")
        closed = _render(tokenizer, _chat(USER, ANSWER), opens=False).split(ANSWER)[1]
        end_of_user = _render(tokenizer, _chat(USER), opens=False).split(USER)[1]
    except Exception:  # a template may raise anything
        return None
    if not to_answer.startswith(end_of_user) or not between.startswith(closed):
        return None
    before_user = between.removeprefix(closed)
    beginning = before.removesuffix(before_user)
    answer = (to_answer.removeprefix(end_of_user), closed)
    system = ("", "")
    try:
        with_system = _render(tokenizer, [{"role": "system", "content": SYSTEM}, *_chat(USER)])
        head, tail = with_system.split(USER)[0].split(SYSTEM)
        system = (head.removeprefix(beginning), tail.removesuffix(before_user))
    except Exception:  # no place for one
        with_system = ""
    around = Around(
        system, (before_user, end_of_user), answer, opening.removeprefix(end_of_user), beginning
    )
    chats = [_chat("a"), _chat("Hello there", "Hi.", "and now?", "Well", "x")]
    chats += [[{"role": "system", "content": "be brief"}, *each] for each in chats if with_system]
    same = all(around.render(each) == _render(tokenizer, each) for each in chats)
    return around if same and opening == after else None


def _in_go(around: Around) -> str:
    """Go's template for it."""

    def said(role: str, pair: tuple[str, str]) -> str:
        return f'{{{{ if eq .Role "{role}" }}}}{pair[0]}{{{{ .Content }}}}{pair[1]}{{{{ end }}}}'

    every = [said("system", around.system)] if any(around.system) else []
    every += [said("user", around.user), said("assistant", around.answer)]
    return (
        f"{around.beginning}{{{{ range .Messages }}}}{''.join(every)}{{{{ end }}}}{around.opening}"
    )
