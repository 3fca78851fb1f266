"""By what a prefix is found again: a chain of keys, one a hash block (docs/prefix_keys.md).

The server makes the same from a prompt; here they serve to place prompts on servers, and to tell what shares what.
"""

import dataclasses
import hashlib
import struct

import numpy as np

from kvtier.v1 import kv_tier_pb2 as pb

_VERSION = b"kvtier prefix 1"
_TOKEN_IDS, _BLOCK_HASH = 0, 1


def _bytes(value):
    return value.encode() if isinstance(value, str) else bytes(value)


def _text(value):
    value = _bytes(value)
    return struct.pack("<I", len(value)) + value


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A prompt from its first token: token_ids, or instead block_hashes, the engine's own of each hash block.

    salt: prompts of different salts share nothing. adapter: the LoRA's name. extra_keys: {hash block: bytes}, what belongs to a
    block beside its tokens, the hash of an image whose placeholder tokens lie in it, say.
    """

    token_ids: object = ()
    block_hashes: tuple = ()
    salt: bytes | str = b""
    adapter: str = ""
    extra_keys: dict = dataclasses.field(default_factory=dict)

    def to_proto(self):
        return pb.Prompt(
            salt=_bytes(self.salt),
            adapter=self.adapter,
            token_ids=self.token_ids,
            block_hashes=self.block_hashes,
            extra_keys=[pb.ExtraKey(block=block, key=_bytes(key)) for block, key in sorted(self.extra_keys.items())],
        )


def root_key(namespace, model_id, prompt):
    """Everything but tokens that tells one prefix from another, as 32 bytes."""
    fields = (_VERSION, namespace or "default", prompt.salt, model_id, prompt.adapter)
    return hashlib.sha256(b"".join(map(_text, fields))).digest()


def prefix_keys(namespace, model_id, prompt, hash_block_tokens=16):
    """The keys of the prompt's whole hash blocks, in order, 32 bytes each."""
    if len(prompt.token_ids) and len(prompt.block_hashes):
        raise ValueError("prompt has token_ids and block_hashes; want one of the two")
    if len(prompt.block_hashes):
        contents = [struct.pack("<I", _BLOCK_HASH) + _text(block) for block in prompt.block_hashes]
    else:
        ids = np.asarray(prompt.token_ids, dtype="<u4")
        blocks = ids[: len(ids) // hash_block_tokens * hash_block_tokens].reshape(-1, hash_block_tokens)
        contents = [struct.pack("<II", _TOKEN_IDS, hash_block_tokens) + block.tobytes() for block in blocks]
    keys = []
    key = root_key(namespace, model_id, prompt)
    for block, content in enumerate(contents):
        key = hashlib.sha256(key + content + _text(prompt.extra_keys.get(block, b""))).digest()
        keys.append(key)
    return keys
