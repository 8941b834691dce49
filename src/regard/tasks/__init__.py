"""What people use these models for: translate, summarize, answer, complete."""

from regard.tasks.completion import complete, completing
from regard.tasks.question_answering import answer
from regard.tasks.records import Answer, Attended, Completion, Part, Summary, Translation
from regard.tasks.summarization import summarize
from regard.tasks.translation import translate

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
