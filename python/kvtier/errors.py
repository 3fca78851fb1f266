"""The server's refusals as exceptions."""

import contextlib

import grpc


class KvTierError(Exception):
    """What the server, or the way to it, answered.

    code: grpc.StatusCode; reason: "TOKEN_GAP" and the like (docs/errors.md), "" where the error is not the server's own.
    """

    def __init__(self, code, message, reason=""):
        super().__init__(f"{code.name}: {message}" + (f" [{reason}]" if reason else ""))
        self.code = code
        self.message = message
        self.reason = reason


@contextlib.contextmanager
def rpc_errors():
    """Within it a grpc.RpcError is the KvTierError that it stands for."""
    try:
        yield
    except grpc.RpcError as error:
        raise from_rpc_error(error) from error


def from_rpc_error(error):
    """The KvTierError of a grpc.RpcError."""
    metadata = dict(error.trailing_metadata() or ())
    return KvTierError(error.code(), error.details(), _reason(metadata.get("grpc-status-details-bin", b"")))


def _fields(data):
    """(number, value) of each field of a protobuf message."""
    at = 0

    def varint():
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(data):
        tag = varint()
        if tag & 7 == 0:
            yield tag >> 3, varint()
        elif tag & 7 == 2:
            length = varint()
            yield tag >> 3, data[at : at + length]
            at += length
        else:
            return


def _reason(status):
    """ErrorInfo.reason out of google.rpc.Status: details (3), Any.value (2), reason (1).

    Read by hand: stubs of google/rpc would collide with those that other packages bring.
    """
    for number, any_message in _fields(status):
        if number == 3:
            error_info = dict(_fields(any_message)).get(2, b"")
            return dict(_fields(error_info)).get(1, b"").decode()
    return ""
