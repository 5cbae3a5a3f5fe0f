"""Short forms of the chat templates of families, as each sends them to its model."""

LLAMA_2 = (
    "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}{% set system ="
    " '<<SYS>>\n' + messages[0]['content'] + '\n<</SYS>>\n\n' %}{% else %}{% set rest = messages"
    " %}{% set system = '' %}{% endif %}{% for m in rest %}{% if m['role'] == 'user' %}{{ bos_token"
    " + '[INST] ' + (system if loop.index0 == 0 else '') + m['content'].strip() + ' [/INST]' }}{%"
    " else %}{{ ' ' + m['content'].strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)


LLAMA_3 = (
    "{{ bos_token }}{% if date_string is defined %}{% set day = date_string %}{% elif strftime_now"
    " is defined %}{% set day = strftime_now('%d %b %Y') %}{% else %}{% set day = '26 Jul 2024'"
    " %}{% endif %}{{ '<|start_header_id|>system<|end_header_id|>\n\nToday Date: ' + day + '\n\n'"
    " }}{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] | trim }}{% set messages"
    " = messages[1:] %}{% endif %}<|eot_id|>{% for m in messages %}{{ '<|start_header_id|>' +"
    " m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim }}{{ '<|eot_id|>' }}{% endfor %}{%"
    " if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%"
    " endif %}"
)


MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content']"
    " + ' [/INST]' }}{% elif m['role'] == 'assistant' %}{{ m['content'] + eos_token }}{% else %}{{"
    " raise_exception('no system') }}{% endif %}{% endfor %}"
)


ZEPHYR = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + eos_token + '\n' }}"
    "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}"
)


CHATML = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n'"
    " }}{% endif %}{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] +"
    " '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%"
    " endif %}"
)


QWEN_3 = (
    "{% set at = namespace(last=-1) %}{% for m in messages %}{% if m['role'] == 'user' %}{% set"
    " at.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}{{ '<|im_start|>' +"
    " m['role'] + '\n' }}{% if m['role'] == 'assistant' %}{% set parts ="
    " m['content'].split('</think>') %}{% if loop.index0 > at.last %}{{ '<think>\n' +"
    " (parts[0].split('<think>')[-1].strip() if parts | length > 1 else '') }}{{ '\n</think>\n\n'"
    " }}{% endif %}{{ parts[-1].lstrip('\n') }}{% else %}{{ m['content'] }}{% endif %}{{"
    " '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%"
    " endif %}"
)


GEMMA = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'assistant' %}{% set role = 'model'"
    " %}{% else %}{% set role = m['role'] %}{% endif %}{{ '<start_of_turn>' + role + '\n' +"
    " m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{"
    " '<start_of_turn>model\n' }}{% endif %}"
)


GEMMA_4 = (
    "{% macro spoken(text) %}{% for part in text.split('<channel|>') %}{{"
    " part.split('<|channel>')[0] }}{% endfor %}{% endmacro %}{{ bos_token }}{% for m in messages"
    " %}{{ '<|turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\n' }}{% for call in"
    " m.tool_calls or [] %}{{ '<|tool_call>' + call['function']['name'] }}{% endfor %}{{"
    " spoken(m['content'] or '') | trim + '<turn|>\n' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|turn>model\n<|channel>thought\n<channel|>' }}{% endif %}"
)


PHI_3 = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endfor"
    " %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)


PHI_4 = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '<|im_sep|>' + m['content'] +"
    " '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>'"
    " }}{% endif %}"
)


DEEPSEEK = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '<|User|>' + m['content']"
    " }}{% elif m['role'] == 'system' %}{{ m['content'] }}{% else %}{{ '<|Assistant|>' +"
    " m['content'].split('</think>')[-1] + eos_token }}{% endif %}{% endfor %}{% if"
    " add_generation_prompt %}{{ '<|Assistant|>' + opened }}{% endif %}"
)


DEEPSEEK_3 = DEEPSEEK.replace("opened", "''")


DEEPSEEK_R1 = DEEPSEEK.replace("opened", "'<think>\n'")


VICUNA = (
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] + ' ' }}{% set messages ="
    " messages[1:] %}{% endif %}{% for m in messages %}{% if m['role'] == 'user' %}{{ 'USER: ' +"
    " m['content'] + ' ' }}{% else %}{{ 'ASSISTANT: ' + m['content'] + eos_token }}{% endif %}{%"
    " endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT: ' }}{% endif %}"
)


PLAIN = (
    "{% for m in messages %}{{ '### ' + m['role'] + ':\n' + m['content'] + '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### assistant:\n' }}{% endif %}"
)


MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant'"
    " %}{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}{{"
    " m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{"
    " '<|im_start|>assistant\n' }}{% endif %}"
)


TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}{% for"
    " m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + (m['content'] or '') }}{% for call in"
    " m.tool_calls or [] %}{{ '\n<tool_call>\n' + call['function'] | tojson + '\n</tool_call>' }}{%"
    " endfor %}{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{"
    " '<|im_start|>assistant\n' }}{% endif %}"
)


WORDS = [
    "<|im_start|>",
    "<|im_end|>",
    "<|im_sep|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<|turn>",
    "<turn|>",
    "<|channel>",
    "<channel|>",
    "<|end|>",
    "<|user|>",
    "<|assistant|>",
    "<|system|>",
    "<|User|>",
    "<|Assistant|>",
    "<think>",
    "</think>",
]
