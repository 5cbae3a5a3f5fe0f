"""The `Modelfile` of Ollama beside a GGUF file: its template in Go's language, and where an answer
ends.

Ollama does not read the template of transformers. What stands around each message is found by
rendering a chat, put together again in Go's language, and kept only where it gives the same text as
the tokenizer's template for chats that it was not made of. Else nothing is written of it.
"""

from __future__ import annotations

from typing import Any

Message = dict[str, str]
Around = dict[str, tuple[str, str]]
"""By role: what stands before and behind a message. Of "": before the first, behind the last."""


def modelfile(tokenizer: Any, generation: Any, *, is_chat: bool = True) -> tuple[str, list[str]]:
    """(the text of the file, notes); `is_chat`: it was trained on chats, not on texts as they
    are.
    """
    lines, notes = ["FROM ./model.gguf"], []
    if tokenizer.chat_template is None or not is_chat:
        lines.append('TEMPLATE """{{ .Prompt }}"""')
    elif (around := _found(tokenizer)) is not None:
        lines.append(f'TEMPLATE """{_in_go(around)}"""')
    else:
        notes.append(
            "the chat template can't be written in Ollama's language: the Modelfile has none,"
            " Ollama guesses"
        )
    named = getattr(generation, "eos_token_id", None)
    ends = [tokenizer.eos_token_id, *(named if isinstance(named, list) else [named])]
    known = [index for index in dict.fromkeys(ends) if index is not None]
    texts = tokenizer.convert_ids_to_tokens(known)
    lines += [f'PARAMETER stop "{text}"' for text in texts if text and '"' not in text]
    return "\n".join(lines) + "\n", notes


def _found(tokenizer: Any) -> Around | None:
    """What stands around messages, None where the template is not of that kind."""
    begins = tokenizer.bos_token or ""

    def rendered(messages: list[Message], opens: bool = True) -> str:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=opens)
        return str(text).removeprefix(begins)

    def around(messages: list[Message], opens: bool) -> list[str]:
        """What stands before, between and behind the contents."""
        rest, found = rendered(messages, opens), []
        for message in messages:
            before, rest = rest.split(message["content"])
            found.append(before)
        return [*found, rest]

    try:
        head, end_of_user = around(_chat("FIRSTWORDS"), opens=False)
        _, to_answer, to_user, _ = around(
            _chat("FIRSTWORDS", "SECONDWORDS", "THIRDWORDS"), opens=False
        )
        *_, closed = around(_chat("FIRSTWORDS", "SECONDWORDS"), opens=False)
        *_, opening = around(_chat("FIRSTWORDS"), opens=True)
    except Exception:  # a template may raise anything
        return None
    before_user = to_user.removeprefix(closed)
    beginning = head.removesuffix(before_user)
    found = {
        "user": (before_user, end_of_user),
        "assistant": (to_answer.removeprefix(end_of_user), closed),
        "": (beginning, opening.removeprefix(end_of_user)),
    }
    try:
        first, second, _ = around([_system("SYSTEMWORDS"), *_chat("FIRSTWORDS")], opens=False)
        system = first.removeprefix(beginning), second.removesuffix(before_user)
        found = {"system": system, **found}
    except Exception:  # no place for one
        pass
    chats = [_chat("a"), _chat("Hello there", "Hi.", "and now?", "Well", "x")]
    chats += [[_system("be brief"), *each] for each in chats if "system" in found]
    return found if all(_render(found, each) == rendered(each) for each in chats) else None


def _system(content: str) -> Message:
    return {"role": "system", "content": content}


def _chat(*contents: str) -> list[Message]:
    return [
        {"role": "assistant" if number % 2 else "user", "content": content}
        for number, content in enumerate(contents)
    ]


def _render(around: Around, messages: list[Message]) -> str:
    """As Ollama does it."""
    parts = [
        around[each["role"]][0] + each["content"] + around[each["role"]][1] for each in messages
    ]
    return "".join(parts).join(around[""])


def _in_go(around: Around) -> str:
    every = [
        f'{{{{ if eq .Role "{role}" }}}}{before}{{{{ .Content }}}}{behind}{{{{ end }}}}'
        for role, (before, behind) in around.items()
        if role
    ]
    beginning, opening = around[""]
    return f"{beginning}{{{{ range .Messages }}}}{''.join(every)}{{{{ end }}}}{opening}"
