"""Small templates of our own, which write what those of other model families write around turns, calls and results."""

from __future__ import annotations

_MINIMAX_CALLS = """{{- '\\n<minimax:tool_call>\\n' }}
{%- for c in m.tool_calls %}
    {{- '<invoke name="' ~ c.function.name ~ '">\\n' }}
    {%- for key, value in c.function.arguments.items() %}
        {{- '<parameter name="' ~ key ~ '">' ~ (value if value is string else value | tojson) ~ '</parameter>\\n' }}
    {%- endfor %}
    {{- '</invoke>\\n' }}
{%- endfor %}
{{- '</minimax:tool_call>' }}"""

_DSML_CALLS = """{{- '\\n\\n<｜DSML｜function_calls>\\n' }}
{%- for c in m.tool_calls %}
    {{- '<｜DSML｜invoke name="' ~ c.function.name ~ '">\\n' }}
    {%- for key, value in c.function.arguments.items() %}
        {{- '<｜DSML｜parameter name="' ~ key ~ '" string="' ~ ('true' if value is string else 'false') ~ '">' }}
        {{- (value if value is string else value | tojson) ~ '</｜DSML｜parameter>\\n' }}
    {%- endfor %}
    {{- '</｜DSML｜invoke>\\n' }}
{%- endfor %}
{{- '</｜DSML｜function_calls>' }}"""

_SEED_CALLS = """{%- for c in m.tool_calls %}
    {{- '\\n<seed:tool_call>\\n<function=' ~ c.function.name ~ '>\\n' }}
    {%- for key, value in c.function.arguments.items() %}
        {{- '<parameter=' ~ key ~ '>' ~ value ~ '</parameter>\\n' }}
    {%- endfor %}
    {{- '</function>\\n</seed:tool_call>' }}
{%- endfor %}"""

_LAST = """{%- set ns = namespace(last = -1) %}
{%- for m in messages %}{%- if WHICH %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"""
_LAST_ANSWER = _LAST.replace("WHICH", "m.role == 'assistant' and not m.tool_calls")
_LAST_USER = _LAST.replace("WHICH", "m.role == 'user'")

_SHORT_ID = "{{- raise_exception('the ids of calls have 9 letters') if ID | length != 9 else '' }}"

FAMILIES: dict[str, str] = {
    # Results name the call that they answer; thoughts before the last answer are left out.
    "kimi_k2": _LAST_ANSWER
    + """{%- if tools %}{{- '<|im_system|>tool_declare<|im_middle|>' ~ tools | tojson ~ '<|im_end|>' }}{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {{- '<|im_assistant|>assistant<|im_middle|><think>' }}
        {{- (m.reasoning_content or '' if loop.index0 > ns.last else '') ~ '</think>' ~ (m.content or '') }}
        {%- if m.tool_calls %}{{- '<|tool_calls_section_begin|>' }}
            {%- for c in m.tool_calls %}
                {{- '<|tool_call_begin|>' ~ c.id ~ '<|tool_call_argument_begin|>' }}
                {{- c.function.arguments | tojson ~ '<|tool_call_end|>' }}
            {%- endfor %}
        {{- '<|tool_calls_section_end|>' }}{%- endif %}
    {%- elif m.role == 'tool' %}
        {{- '<|im_system|>tool<|im_middle|>## Return of ' ~ m.tool_call_id ~ '\\n' ~ m.content }}
    {%- else %}
        {{- ('<|im_user|>' if m.role == 'user' else '<|im_system|>') ~ m.role ~ '<|im_middle|>' ~ m.content }}
    {%- endif %}
    {{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_assistant|>assistant<|im_middle|>' }}{%- endif %}""",
    # Neighbouring results share a turn; thoughts before the last question are left out.
    "minimax_m2": _LAST_USER
    + """{{- ']~!b[' }}{%- if tools %}{{- ']~b]system\\n' ~ tools | tojson ~ '[e~[\\n' }}{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {{- ']~b]ai\\n' }}
        {%- if m.reasoning_content and loop.index0 > ns.last %}
            {{- '<think>\\n' ~ m.reasoning_content ~ '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- m.content or '' }}
        {%- if m.tool_calls %}"""
    + _MINIMAX_CALLS
    + """{%- endif %}
        {{- '[e~[\\n' }}
    {%- elif m.role == 'tool' %}
        {%- if loop.previtem.role != 'tool' %}{{- ']~b]tool' }}{%- endif %}
        {{- '\\n<response>' ~ m.content ~ '</response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '[e~[\\n' }}{%- endif %}
    {%- else %}
        {{- ']~b]' ~ m.role ~ '\\n' ~ m.content ~ '[e~[\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- ']~b]ai\\n<think>\\n' }}{%- endif %}""",
    # One list of calls, and results with short ids, as up to Mistral Small 3.1.
    "mistral_list": """{{- bos_token }}
{%- if tools %}{{- '[AVAILABLE_TOOLS] ' ~ tools | tojson ~ '[/AVAILABLE_TOOLS]' }}{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {{- m.content or '' }}
        {%- if m.tool_calls %}{{- '[TOOL_CALLS] [' }}
            {%- for c in m.tool_calls %}"""
    + _SHORT_ID.replace("ID", "c.id")
    + """
                {{- (c.function | tojson)[:-1] ~ ', "id": "' ~ c.id ~ '"}' ~ (']' if loop.last else ', ') }}
            {%- endfor %}
        {%- endif %}
        {{- eos_token }}
    {%- elif m.role == 'tool' %}"""
    + _SHORT_ID.replace("ID", "m.tool_call_id")
    + """
        {{- '[TOOL_RESULTS] {"content": ' ~ m.content ~ ', "call_id": "' ~ m.tool_call_id ~ '"}[/TOOL_RESULTS]' }}
    {%- elif m.role == 'system' %}
        {{- '[SYSTEM_PROMPT]' ~ m.content ~ '[/SYSTEM_PROMPT]' }}
    {%- else %}
        {{- '[INST]' ~ m.content ~ '[/INST]' }}
    {%- endif %}
{%- endfor %}""",
    # Each call by itself, results without ids, and thoughts that stay.
    "mistral": """{{- bos_token }}
{%- if tools %}{{- '[AVAILABLE_TOOLS]' ~ tools | tojson ~ '[/AVAILABLE_TOOLS]' }}{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- if m.reasoning_content %}{{- '[THINK]' ~ m.reasoning_content ~ '[/THINK]' }}{%- endif %}
        {{- m.content or '' }}
        {%- for c in m.tool_calls or [] %}
            {{- '[TOOL_CALLS]' ~ c.function.name ~ '[ARGS]' ~ c.function.arguments | tojson }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif m.role == 'tool' %}
        {{- '[TOOL_RESULTS]' ~ m.content ~ '[/TOOL_RESULTS]' }}
    {%- elif m.role == 'system' %}
        {{- '[SYSTEM_PROMPT]' ~ m.content ~ '[/SYSTEM_PROMPT]' }}
    {%- else %}
        {{- '[INST]' ~ m.content ~ '[/INST]' }}
    {%- endif %}
{%- endfor %}""",
    # The template writes what opens or closes a thought behind questions and results, not in front of the reply.
    "deepseek_v32": _LAST_USER
    + """{{- bos_token }}{%- if tools %}{{- '<functions>' ~ tools | tojson ~ '</functions>' }}{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- if loop.index0 > ns.last %}{{- (m.reasoning_content or '') ~ '</think>' }}{%- endif %}
        {{- m.content or '' }}
        {%- if m.tool_calls %}"""
    + _DSML_CALLS
    + """{%- endif %}
        {{- eos_token }}
    {%- elif m.role == 'tool' %}
        {%- if loop.previtem.role != 'tool' %}{{- '\\n\\n<function_results>' }}{%- endif %}
        {{- '\\n<result>' ~ m.content ~ '</result>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}
            {{- '\\n</function_results>\\n\\n' ~ ('<think>' if loop.index0 > ns.last else '</think>') }}
        {%- endif %}
    {%- elif m.role == 'user' %}
        {{- '<｜User｜>' ~ m.content ~ '<｜Assistant｜>' ~ ('<think>' if loop.index0 == ns.last else '</think>') }}
    {%- else %}
        {{- m.content }}
    {%- endif %}
{%- endfor %}""",
    "seed_oss": """{%- if tools %}{{- '<seed:bos>system\\n' ~ tools | tojson ~ '<seed:eos>' }}{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {{- '<seed:bos>assistant' }}
        {%- if m.reasoning_content %}{{- '\\n<seed:think>' ~ m.reasoning_content ~ '</seed:think>' }}{%- endif %}
        {%- if m.content %}{{- '\\n' ~ m.content }}{%- endif %}
        {%- if m.tool_calls %}"""
    + _SEED_CALLS
    + """{%- endif %}
        {{- '<seed:eos>' }}
    {%- else %}
        {{- '<seed:bos>' ~ m.role ~ '\\n' ~ m.content ~ '<seed:eos>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<seed:bos>assistant\\n' }}{%- endif %}""",
}
