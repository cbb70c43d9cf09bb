import pytest

from data_contracts.strict_json import parse_json


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a":1,"a":2}', "duplicate key 'a'"),
        ('{"meta":[{"b":{"c":1,"d":2,"c":1}}]}', "duplicate key 'c'"),
        ('{"a":NaN}', "NaN is not JSON"),
        ("[-Infinity]", "-Infinity is not JSON"),
        ("1e999", "number out of range"),
        ("9" * 5000, "integer of 5000 digits"),
        ('"\\ud800"', "surrogate"),
        ('{"\\udfff": 1}', "surrogate"),
        ("{", "not JSON"),
        ("", "not JSON"),
        ("[" * 200_000, "nested too deeply"),
    ],
)
def test_refused(text, message):
    with pytest.raises(ValueError, match="^.*" + message):
        parse_json(text)


def test_accepted_as_written():
    assert parse_json('{"a":[1,2.5,"\\ud83d\\ude00",null,true],"b":{}}') == {"a": [1, 2.5, "😀", None, True], "b": {}}
    assert type(parse_json("3")) is int
    assert type(parse_json("3.0")) is float
