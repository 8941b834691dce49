"""What people use these models for: translate, summarize, answer, complete."""

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
