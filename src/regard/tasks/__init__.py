"""What people use these models for: translate, summarize, answer, complete."""

from regard.tasks.answering import answer
from regard.tasks.continuing import complete, completing
from regard.tasks.records import Answer, Attended, Completion, Part, Summary, Translation
from regard.tasks.summarizing import summarize
from regard.tasks.translating import translate

__all__ = [
    "Answer",
    "Attended",
    "Completion",
    "Part",
    "Summary",
    "Translation",
    "answer",
    "complete",
    "completing",
    "summarize",
    "translate",
]
