"""The tasks: translate, summarize, answer and complete.

A task takes one text and returns a record, or takes a list of texts and returns a list of records.
All tasks share these options:

- ``model``: the name of a shipped or downloaded model (``regard models``), or a folder.
- ``how``: the decoding strategy, such as ``Beam(num_beams=4)``, or only the settings to change from
  the model's defaults, such as ``{"num_beams": 4}``.
- ``max_new_tokens``: the maximum number of tokens to generate for a text, a sentence or a part.
- ``batch``: the number of inputs (texts, sentences, parts or windows) in one forward pass.
- ``attended``: whether to return attention weights between words, which takes another forward pass.
- ``device``: where the model runs. ``precision``: float32, bfloat16 or int8.
- ``check``: a function that every loop of the task calls; it may raise to end the task early.

A record has a ``confidence`` from 0 to 1, ``reasons`` against it, and ``doubtful``, whether the
confidence is below 0.5. The cards of the shipped models say how it was measured.
"""

from regard.tasks.completion import complete, stream_completion
from regard.tasks.question_answering import answer
from regard.tasks.records import Answer, Completion, Part, Summary, Translation, WordAttention
from regard.tasks.summarization import summarize
from regard.tasks.translation import translate

__all__ = [
    "Answer",
    "Completion",
    "Part",
    "Summary",
    "Translation",
    "WordAttention",
    "answer",
    "complete",
    "stream_completion",
    "summarize",
    "translate",
]
