"""Profiles are read back as they were written, and everything that is wrong with one is said at once."""

import dataclasses
import json

import pytest

from mindspeed_mem.adaptive.problem import profile_file
from tests.planning import LAYER, small_problem


@pytest.fixture
def written(tmp_path):
    """A profile's file and its content, to be changed."""
    early = dataclasses.replace(LAYER.groups[1], leaves=((LAYER.groups[1].used_by[-1], 10**6),))
    kind = dataclasses.replace(LAYER, groups=(LAYER.groups[0], early, *LAYER.groups[2:]))
    problem = small_problem(stages=2, virtual=2, layers=2, micro_batches=4, host=10**9, kind=kind)
    profile = profile_file.Profile(
        problem=problem, machine={"device": "x", "ranks": 8}, model={"layers": 8}, shapes={"tp": 1}
    )
    path = tmp_path / "profile.json"
    profile_file.write(profile, path)
    return profile, path, json.loads(path.read_text())


def change(path, content):
    path.write_text(json.dumps(content))
    with pytest.raises(profile_file.ProfileError) as error:
        profile_file.read(path)
    return error.value.problems


def test_what_was_written_is_read_back(written):
    profile, path, content = written
    assert profile_file.read(path) == profile
    assert content["in_flight"] == [[[3, 2], [4, 1]], [[2, 1], [3, 0]]]
    assert content["problem"]["classes"][0]["groups"][1]["name"] == LAYER.groups[1].name


def test_the_version_before_is_read_and_another_is_refused_with_what_to_do(written):
    profile, path, content = written
    for stage in content["problem"]["stages"]:
        stage["chunks"] = stage.pop("parts")
    path.write_text(json.dumps({**content, "version": 1}))
    assert profile_file.read(path) == profile
    assert change(path, {"format": content["format"], "version": 1, "problem": {"stages": 3}})
    [said] = change(path, {**content, "version": 3})
    assert "got 3" in said and "reads 1 to 2" in said and "profile again" in said


def test_a_link_that_blocks_is_kept_and_links_of_older_files_do_not_block(written):
    profile, path, content = written
    assert content["problem"]["link"].pop("blocking") is False
    path.write_text(json.dumps(content))
    assert profile_file.read(path) == profile
    link = dataclasses.replace(profile.problem.link, blocking=True)
    blocking = dataclasses.replace(profile, problem=dataclasses.replace(profile.problem, link=link))
    profile_file.write(blocking, path)
    assert profile_file.read(path) == blocking != profile


def test_all_problems_of_a_file_are_said_at_once(written):
    _, path, content = written
    problem = content["problem"]
    problem["classes"][0]["groups"][2]["bytes"] = -1
    problem["classes"][0]["groups"][1]["recompute_seconds"] = "fast"
    problem["classes"][0]["groups"][1]["leaves"] = [["qkv"], ["qkv", "all"]]
    problem["link"]["speed"] = 3
    del problem["device_limit"]
    content["origin"] = "guessed"
    content["more"] = 1
    assert change(path, content) == (
        "more: unknown; allowed: format, in_flight, machine, model, origin, problem, shapes, version",
        "origin: got 'guessed'; allowed: measured, estimated",
        "problem.classes[0].groups[1].leaves[0]: got ['qkv']; allowed: a list of 2",
        "problem.classes[0].groups[1].leaves[1][1]: got 'all'; allowed: a whole number of at least 0",
        "problem.classes[0].groups[1].recompute_seconds: got 'fast'; allowed: a number of at least 0",
        "problem.classes[0].groups[2].bytes: got -1; allowed: a whole number of at least 0",
        "problem.link.speed: unknown; allowed: out, back, out_alone, back_alone, blocking, slows",
        "problem.device_limit: missing",
    )


def test_names_that_do_not_fit_together_are_found(written):
    _, path, content = written
    group = content["problem"]["classes"][0]["groups"][1]
    group.update(
        used_by=["nobody"],
        needs=["act"],
        operators=["norm", "other"],
        recompute_keeps=10**12,
        leaves=[["none", 10**12]],
    )
    assert "output_gradients" not in content["problem"]
    content["problem"]["output_gradients"] = True
    content["problem"]["classes"][0]["operators"][2]["gradient_bytes"] = 8
    content["problem"]["stages"][0]["parts"][0]["after"]["gradient_bytes"] = 9
    content["problem"]["stages"][1]["parts"][0]["layers"] = ["layer", "moe"]
    content["problem"]["stages"][0]["parts"][1]["first_layer"] = 7
    content["problem"]["link"]["out"] = 0
    content["problem"]["pipeline"]["micro_batches"] = 1
    found = change(path, content)
    parts = [
        "output_gradients: plans say that",
        "(qkv).gradient_bytes: got 8; allowed: at most its weight_bytes, 0",
        "'other' is no operator of layer",
        "'nobody' is no operator of layer",
        "leaves: 'none' is not in its used_by",
        "'act' is no group that stands before it",
        "recompute_keeps: got 1000000000000",
        "leaves: got 1000000000000 bytes",
        "stages[0].parts[0].after.gradient_bytes: got 9",
        "there is no class 'moe'",
        "first_layer: got 7; allowed: 4",
        "link.out: got 0",
        "the group size is 2",
    ]
    assert len(found) == len(parts)
    assert all(part in text for part, text in zip(parts, found, strict=True))


def test_in_flight_counts_are_those_of_the_schedule(written):
    _, path, content = written
    content["in_flight"][0] = [[9, 9]]
    assert change(path, content)[0].startswith("in_flight: got [[[9, 9]]")


@pytest.mark.parametrize("text", ["", "[1", "[]", '{"format": "other"}', '{"format": "mindspeed_mem profile"}'])
def test_what_is_no_profile_is_refused(tmp_path, text):
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(profile_file.ProfileError, match="1 problem"):
        profile_file.read(path)
    with pytest.raises(profile_file.ProfileError, match="cannot be read"):
        profile_file.read(tmp_path / "absent.json")


def test_limits_can_be_changed_without_reading_again(written):
    profile, _, _ = written
    assert profile.problem.with_limit(5) == dataclasses.replace(profile.problem, device_limit=5)
