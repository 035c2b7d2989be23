"""Messages between agents are decoded in one place: a handler gets all fields of a type."""

from __future__ import annotations

import json
from typing import Any, get_args, get_type_hints

import pytest

from monarch._engine.protocol import agent_messages
from monarch._engine.wire import json_message

TYPES = agent_messages._TYPES


def test_the_table_has_each_type_under_the_name_that_its_messages_carry() -> None:
    kinds = get_args(agent_messages.AgentMessage)
    assert {get_args(get_type_hints(kind)["op"])[0]: kind for kind in kinds} == TYPES


@pytest.mark.parametrize("op", sorted(TYPES))
def test_a_message_that_lacks_a_field_is_refused_with_its_name(op: str) -> None:
    message: dict[str, Any] = {**dict.fromkeys(TYPES[op].__required_keys__, 0), "op": op}
    assert message == agent_messages.decode(json_message.encode(message))
    for missing in message.keys() - {"op"}:
        rest = {name: value for name, value in message.items() if name != missing}
        with pytest.raises(ValueError, match=f"'{op}' lacks {missing}"):
            agent_messages.decode(json.dumps(rest).encode())


@pytest.mark.parametrize("body", [b'{"op": "dance"}', b'{"op": "kill", "uids": []}'])
def test_an_unknown_message_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError, match="there is no message"):
        agent_messages.decode(body)
