"""Fixtures of the cloud tier's unit tests: a fake engine on a socket, and a real, tiny tokenizer."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from cloud.text import CloudTokenizer
from cloud.vllm.client import VllmClient
from protos.manifest import CloudSide, EdgeSide, Manifest, Variant, encode_manifest
from tests.fakes.openai_server import FakeOpenAIServer


@pytest.fixture
def socket_dir() -> Iterator[Path]:
    """Short: a Unix socket's path has room for about a hundred bytes, and pytest's own are long."""
    with tempfile.TemporaryDirectory(prefix="fb-") as path:
        yield Path(path)


@pytest.fixture
async def engine(socket_dir: Path) -> AsyncIterator[FakeOpenAIServer]:
    async with FakeOpenAIServer(socket_dir / "s") as server:
        yield server


@pytest.fixture
async def client(engine: FakeOpenAIServer) -> AsyncIterator[VllmClient]:
    client = VllmClient.connect(
        f"unix://{engine.socket_path}", model="support-bot@1", max_connections=8, connect_timeout_s=2.0
    )
    yield client
    await client.aclose()


@pytest.fixture(scope="session")
def byte_tokenizer() -> Tokenizer:
    """A token is a byte, and its id is the byte's value: what the fake engine speaks, too."""
    # The ByteLevel alphabet writes each byte as one printable character; this is its definition.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    characters = {byte: chr(byte) for byte in printable}
    others = [byte for byte in range(256) if byte not in characters]
    characters |= {byte: chr(256 + n) for n, byte in enumerate(others)}
    vocabulary = {character: byte for byte, character in characters.items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@pytest.fixture(scope="session")
def tokenizer(byte_tokenizer: Tokenizer) -> CloudTokenizer:
    return CloudTokenizer(byte_tokenizer)


@pytest.fixture
def store(tmp_path: Path, byte_tokenizer: Tokenizer) -> Path:
    """A store with `support-bot/1`, whose cloud side has a tokenizer and no weights."""
    digest = "0" * 64
    manifest = Manifest(
        line="support-bot",
        version=1,
        edge=EdgeSide(
            model="small",
            license="Apache-2.0",
            context_tokens=256,
            eos_token_ids=[0],
            tokenizer_directory="edge/tokenizer",
            tokenizer_sha256=digest,
            variants=[
                Variant(name="int4", engine="onnxruntime", directory="edge/int4", size_bytes=1, threshold=0.5)
            ],
        ),
        cloud=CloudSide(model="large", license="Apache-2.0", directory="cloud", tokenizer_sha256=digest),
    )
    model_dir = tmp_path / "support-bot" / "1" / "cloud"
    model_dir.mkdir(parents=True)
    (model_dir.parent / "release.json").write_bytes(encode_manifest(manifest))
    byte_tokenizer.save(str(model_dir / "tokenizer.json"))
    return tmp_path
