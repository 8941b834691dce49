"""Every limit on a served request. Python and the command line have none of these."""

MAX_BODY_BYTES = 2**20
MAX_WAITING = 32  # requests that wait or run; the next one gets status 503
MAX_BATCH = 8  # requests that run together
SHUTDOWN_SECONDS = 2  # for running requests to end once the server is stopped

# Characters of a text. A longer one would keep other requests waiting for minutes.
MAX_TRANSLATE = 5_000
MAX_DOCUMENT = 50_000  # to summarize, or to answer a question from
MAX_QUESTION = 1_000
MAX_COMPLETE = 20_000
MAX_LOOK = 10_000  # the work grows with the square of its tokens
MAX_EXPLAIN = 300
MAX_NAME = 500  # of a model, a language, a layer or a word

MAX_NEW_TOKENS = 1_000
MAX_BEAMS = 8
MAX_LENGTH_PENALTY = 10.0  # and its negative is the least
MAX_HEADS = 16  # of a sentence that is explained without a model
MAX_DIM = 64
