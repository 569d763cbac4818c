"""What the model continues. It is a base model: it goes on with a text, and a chat or a tool loop is a text with examples."""

from __future__ import annotations

from typing import Final

TALK: Final = (
    "A helpful assistant answers a user.\n\nUser: Which river runs through Lyon?\nAssistant: The Rhône runs through Lyon. The "
    "Saône joins it there.\nUser: How long is it?\nAssistant: The Rhône is 813 kilometres long.\nUser: {}\nAssistant:"
)

CALLS: Final = (
    "An assistant answers with calls of tools in JSON, one in a line.\n\nUser: What is the weather in Oslo tomorrow?\n"
    'Call: {{"name": "get_weather", "arguments": {{"city": "Oslo", "days": 1, "unit": "celsius"}}}}\n'
    'User: Find three cafés near "Place Bellecour".\n'
    'Call: {{"name": "search_places", "arguments": {{"query": "café", "near": "Place Bellecour", "limit": 3}}}}\n'
    'User: Write "done" into /tmp/state.json.\n'
    'Call: {{"name": "write_file", "arguments": {{"path": "/tmp/state.json", "content": "{{\\"state\\": \\"done\\"}}\\n"}}}}\n'
    "User: {}\nCall:"
)

PROMPTS: Final[dict[str, tuple[str, ...]]] = {
    "English": (
        "The old lighthouse keeper had not seen a ship for three weeks. That morning,",
        "In economics, the term inflation describes",
        "Dear Ms Harrison,\n\nThank you for your letter of last week. We",
        "How to bake bread at home\n\nFirst,",
    ),
    "German, French, Spanish": (
        "Die Stadt liegt am Ufer eines kleinen Flusses und wurde im Jahr",
        "La bibliothèque municipale a été construite au début du siècle dernier. Elle",
        "El tren llegó a la estación con dos horas de retraso, y los viajeros",
        "Der Wetterbericht für morgen: Im Norden",
    ),
    "Russian": (
        "Город расположен на берегу реки и был основан",
        "Весной, когда снег тает, река",
        "Старый учитель вошёл в класс и сказал:",
        "История этой библиотеки началась",
    ),
    "Chinese, Japanese": (
        "这座城市位于河流的北岸，历史悠久。",
        "春天来了，公园里的花",
        "この図書館は百年前に建てられました。",
        "昨日の夕方、駅前で",
    ),
    "Arabic, Hindi": (
        "تقع المدينة على ضفاف نهر صغير وقد تأسست",
        "في فصل الربيع عندما يذوب الثلج",
        "यह शहर एक नदी के किनारे बसा है और",
        "पुराने शिक्षक ने कक्षा में आकर कहा",
    ),
    "code": (
        'def read_config(path):\n    """Read a configuration file and return its sections."""\n',
        "class LRUCache:\n    def __init__(self, capacity):\n        self.capacity = capacity\n",
        "#include <stdio.h>\n\nint main(int argc, char **argv) {\n",
        "export async function fetchUsers(page) {\n  const response = await fetch(`/api/users?page=${page}`);\n",
    ),
    "JSON": (
        '{\n  "users": [\n    {"id": 1, "name": "Ana Núñez", "email": "ana@example.com", "roles": ["admin"]},\n',
        '[{"date":"2024-01-03","open":187.15,"close":184.25,"volume":58414500},{"date":"2024-01-04",',
        '{"openapi": "3.0.0", "info": {"title": "Orders", "version": "1.2.0"}, "paths": {',
        '{"type": "FeatureCollection", "features": [{"type": "Feature", "geometry": {"coordinates": [',
    ),
    "tool calls": tuple(
        CALLS.format(asked)
        for asked in (
            "Find two hotels in Kraków for next Friday.",
            "Convert 250 US dollars to yen.",
            "Write a short poem into notes/poem.txt.",
            "Send a message to Zoë: the meeting is at 15:30.",
        )
    ),
    "chat": tuple(
        TALK.format(asked)
        for asked in (
            "And where does it begin?",
            "Write me a short poem about it.",
            "Which cities lie on it? Give me a list.",
            "How do I get there from Geneva by train?",
        )
    ),
    "numbers": (
        "Q: What is 12 times 17?\nA: 12 * 17 = 12 * 10 + 12 * 7 = 120 + 84 = 204\n\nQ: What is 23 times 46?\nA:",
        "| year | population | area km² |\n|---|---|---|\n| 1990 | 1,204,331 | 87.46 |\n| 2000 |",
        "\\begin{align}\n\\int_0^1 x^2 \\, dx &= \\left[ \\frac{x^3}{3} \\right]_0^1 = \\frac{1}{3} \\\\\n",
        "2024-03-01 08:14:55,203 INFO [worker-3] request 7f3a9c took 182 ms, 4096 bytes\n2024-03-01",
    ),
}
"""By kind of text: what the rollouts begin with, four prompts each."""

SEARCH: Final = (
    "Question: Who wrote the novel that the film Blade Runner is based on?\n<think>I need to find the novel first.</think>\n"
    "<search>Blade Runner based on novel</search>\n\n<information>Blade Runner is based on Do Androids Dream of Electric Sheep?"
    "</information>\n\n<think>Now I need its author.</think>\n<search>Do Androids Dream of Electric Sheep author</search>\n\n"
    "<information>The novel was written by Philip K. Dick.</information>\n\n<think>I know the answer.</think>\n"
    "<answer>Philip K. Dick</answer>\n\nQuestion: {}\n"
)

REACT: Final = (
    "Answer by Thought, Action, Observation.\n\nQuestion: What is the capital of the country where the Rhine begins?\n"
    "Thought: I need to find where the Rhine begins.\nAction: Search[source of the Rhine]\nObservation: The Rhine begins in "
    "Switzerland.\nThought: I need the capital of Switzerland.\nAction: Search[capital of Switzerland]\nObservation: Bern is "
    "the seat of the government.\nThought: I know the answer.\nAction: Finish[Bern]\n\nQuestion: {}\nThought:"
)

THINKING: Final = (
    "User: What is 17 plus 25?\n<think>17 plus 20 is 37, and 5 more is 42.</think>\nAssistant: It is 42.\nUser: And twice that?"
    "\n<think>Twice 42 is 84.</think>\nAssistant: It is 84.\nUser: {}\n<think>"
)

QUESTIONS: Final = (
    "Which river runs through the city where Mozart was born?",
    "How old was the painter of the Night Watch when he died?",
    "Which country has the longest coastline, and what is its capital?",
    "Who built the tower in Paris, and what else did he build?",
)
"""What loops begin with."""

FURTHER: Final = ("And why?", "Can you say that in other words?", "Are you sure?", "Thanks. Is there more to it?")
"""What a user says next."""
