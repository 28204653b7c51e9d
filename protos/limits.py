"""Every bound that the contract states, once.

The comments in `protos/forebay/v1/*.proto` say the same numbers to callers; a test holds the two together.
Sizes are in bytes of UTF-8 unless the name says characters (Unicode code points).
"""

from __future__ import annotations

from typing import Final

# Input of a generation. A prompt that fits these may still not fit the model's context: the engine says so.
MAX_PROMPT_BYTES: Final = 1024 * 1024
MAX_MESSAGES: Final = 256
# What the cloud may be asked to continue: at most one answer, which a prompt bounds too.
MAX_PREFIX_BYTES: Final = MAX_PROMPT_BYTES
# Token ids that stand for a prompt. No tokenizer makes more tokens than there are bytes.
MAX_PROMPT_TOKENS: Final = MAX_PROMPT_BYTES

# Sampling.
DEFAULT_MAX_TOKENS: Final = 256
# Only a bound on nonsense: the real one is the context of the model that serves.
MAX_MAX_TOKENS: Final = 1024 * 1024
MAX_TEMPERATURE: Final = 2.0
MAX_TOP_K: Final = 1000
MAX_STOP_STRINGS: Final = 8
MAX_STOP_CHARACTERS: Final = 64
MIN_REPETITION_PENALTY: Final = 0.5
MAX_REPETITION_PENALTY: Final = 2.0
MAX_LOGPROBS: Final = 8

# Classification.
MAX_CLASSIFY_TEXT_BYTES: Final = 64 * 1024
MIN_LABELS: Final = 2
MAX_LABELS: Final = 128
MAX_LABEL_CHARACTERS: Final = 256
MAX_LABEL_KIND_CHARACTERS: Final = 64
DEFAULT_LABEL_KIND: Final = "Topic"

# Names.
MAX_REQUEST_ID_CHARACTERS: Final = 128
MAX_LINE_CHARACTERS: Final = 63
# `line@version` with a version of at most 18 digits.
MAX_MODEL_NAME_CHARACTERS: Final = MAX_LINE_CHARACTERS + 1 + 18

# Transport. Well over the largest valid request, so that a prompt of 10 MB is refused by a check that names
# the field and the limit, and not by gRPC, which says RESOURCE_EXHAUSTED and makes callers retry.
MAX_MESSAGE_BYTES: Final = 16 * 1024 * 1024
# Metadata of one call, headers or trailers. Twice gRPC's default, since rich errors travel there.
MAX_METADATA_BYTES: Final = 16 * 1024
# Applied by the servers when a caller sets no deadline.
DEFAULT_DEADLINE_S: Final = 60.0
# gRPC rounds deadlines up to whole milliseconds: one of zero arrives as up to this much. Less is none:
# unchecked, the caller's timer races with the answer, and a fast answer to a deadline of zero often wins.
LEAST_DEADLINE_S: Final = 0.001
# A deadline further away than this is as good as none, and none is not allowed.
MAX_DEADLINE_S: Final = 3600.0
# What a rich error may carry. Message and details travel as trailers: percent-encoded, base64 and twice, they
# must stay under gRPC's 8 KiB, beyond which a peer drops the whole answer.
MAX_ERROR_MESSAGE_BYTES: Final = 1024
MAX_ERROR_METADATA_BYTES: Final = 2048
# The longest pause that a retry hint asks for.
MAX_RETRY_AFTER_S: Final = 300.0
