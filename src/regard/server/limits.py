"""The limits on requests to the server. Python and the command line do not have them."""

MAX_BODY_BYTES = 2**20
MAX_WAITING = 32  # requests that wait or run; further requests get status 503
MAX_BATCH = 8  # requests that run together
SHUTDOWN_SECONDS = 2  # the time that running requests have to end when the server stops

# Characters of a text. Longer texts would keep other requests waiting for minutes.
MAX_TRANSLATE = 5_000
MAX_DOCUMENT = 50_000  # to summarize, or to answer a question from
MAX_QUESTION = 1_000
MAX_COMPLETE = 20_000
MAX_LOOK = 10_000  # the time grows with the square of the number of tokens
MAX_EXPLAIN = 300
MAX_NAME = 500  # the name of a model, a language or a layer, or a word

MAX_NEW_TOKENS = 1_000
MAX_BEAMS = 8
MAX_HEADS = 16  # to explain a sentence without a model
MAX_DIM = 64
