"""hubness.toml: what is wrong with it is told at once, with the path and what to do."""

import re
from pathlib import Path

import numpy as np
import pytest

from milvus_hubness.correction.estimators import NNN
from milvus_hubness.errors import InvalidConfig
from milvus_hubness.serve import ConfigFile, file_faults
from milvus_hubness.serve import config_file as config_file_module
from tests.serve.worlds import config_file

ROOT = Path(__file__).parents[2]
RIGHT = """\
timezone = "Europe/Berlin"

[server]
uri = "http://milvus:19530"
token_file = "token"

[[collection]]
name = "products"
field = "vector"
bank = "past.npy"
method = "NNN"
params = { k = 16 }
fill = "5m"
refresh = "30 4 * * 0"

[[collection]]
name = "videos"
"""


def faults(folder, text):
    """The paths and what is said of them, without the file."""
    with pytest.raises(InvalidConfig) as refused:
        config_file(folder, text)
    return told(refused.value, folder)


def told(error, folder):
    found = []
    for line in str(error).splitlines():
        assert line.startswith(f"{folder / 'hubness.toml'}: ")
        found.append(tuple(line.removeprefix(f"{folder / 'hubness.toml'}: ").split(": ", 1)))
    return found


def test_a_right_one(tmp_path):
    config = config_file(tmp_path, RIGHT).config
    products, videos = config.collection
    assert products.estimator() == NNN(16)
    assert (products.label, products.fill.text) == ("products/vector", "5m")
    assert (videos.estimator(), videos.fill.text, videos.refresh.text) == (
        None,
        "60s",
        "0 3 * * *",
    )


def test_it_listens_on_loopback_unless_told_otherwise(tmp_path):
    assert config_file(tmp_path, RIGHT).config.http.listen == "127.0.0.1:9108"
    given = RIGHT + '[http]\nlisten = "0.0.0.0:9108"\n'
    assert config_file(tmp_path, given).config.http.listen == "0.0.0.0:9108"


def test_all_that_is_wrong_is_told_at_once(tmp_path):
    text = """\
timezone = "Mars"
[server]
uri = "http://root:sesame@milvus:19530"
token = "open-sesame"
[http]
listen = ":9108"

[[collection]]
fill = "61 * * * *"
# the banks
refesh = "60s"
method = "nnm"

[[collection]]
name = "videos"
params = { k = 3 }
bank_column = "embedding"
refit_share = 2
refresh = 60

[[collection]]
name = ""
method = "nnn"
params = { kk = 3 }
[colection]
"""
    found = faults(tmp_path, text)
    expected = {
        "timezone": "no time zone 'Mars'",
        "server.uri": "holds a user or a password: keep them in token_file",
        "server.token": "secrets are not allowed here",
        "http.listen": 'write "127.0.0.1:9108" for this machine only',
        "collection[0].name": "is missing",
        "collection[0].method": "no method 'nnm': use one of blend",
        "collection[0].fill": "'61 * * * *' is not a cron schedule: bad minute",
        "collection[0].refesh": "did you mean 'refresh'?",
        "collection[1].bank_column": "needs a bank",
        "collection[1].params": "needs a method",
        "collection[1].refresh": "must be a text",
        "collection[1].refit_share": "must be less than or equal to 1, not 2",
        "collection[2].name": "should have at least 1 character",
        "collection[2].params": "NNN has no parameter 'kk': use one of k, alpha",
        "colection": "did you mean 'collection'?",
    }
    assert [path for path, _ in found] == list(expected)
    for (_, said), words in zip(found, expected.values(), strict=True):
        assert words in said
    assert "sesame" not in str(found)


@pytest.mark.parametrize(
    ("text", "path", "said"),
    [
        ("", "collection", "is missing: add a [[collection]]"),
        ('[collection]\nname = "products"\n', "collection", "double brackets"),
        (
            RIGHT + '[[collection]]\nname = "videos"\n',
            "collection[2].name",
            "is the same as collection[1]: remove one of them",
        ),
    ],
)
def test_the_path_leads_to_the_fault(tmp_path, text, path, said):
    [fault] = faults(tmp_path, text)
    assert fault[0] == path
    assert said in fault[1]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[server]\nuri = "x\n', r"is not TOML: Illegal character '\n' (at line 2, column 9)"),
        ("a = [1,\n2\n", "is not TOML: Unclosed array (at end of document)"),
        ("a = 1\na = 2\n", "is not TOML: Cannot overwrite a value (at line 2, column 6)"),
        (
            "\na = " + "9" * 5_000,
            "holds a number with thousands of digits: write a shorter one",
        ),
        *(
            (
                f"[[collection]]\nname = 'a'\nmethod = 'nnn'\n{line}",
                f"collection[0].{place}: is a whole number of more than 64 bits: write a shorter "
                "one",
            )
            for line, place in (
                ("refit_share = 0x" + "f" * 5_000, "refit_share"),
                ("hub_scan_rows = 0b" + "1" * 20_000, "hub_scan_rows"),
                ("params = {k = 0o" + "7" * 9_000 + "}", "params.k"),
                (f"params = {{k = [1, {1 << 63}]}}", "params.k[1]"),
            )
        ),
    ],
)
def test_a_file_that_is_no_toml_is_one_line(tmp_path, text, said):
    with pytest.raises(InvalidConfig) as refused:
        config_file(tmp_path, text)
    assert str(refused.value) == f"{tmp_path / 'hubness.toml'}: {said}"


def test_what_tune_chooses_is_no_key(tmp_path):
    text = '[[collection]]\nname = "live"\nstrength = 0.5\ngate = 1\n'
    said = "is chosen by tune, and refreshes keep it: remove this key"
    assert faults(tmp_path, text) == [
        (f"collection[0].{key}", said) for key in ("strength", "gate")
    ]
    text = '[[collection]]\nname = "live"\noverride = true\n'
    assert faults(tmp_path, text) == [
        ("collection[0].override", "needs a method: add the key method, or remove this one")
    ]


EXAMPLES = ["docs/how-to/monitor.md", "docker/hubness.toml", "docker/kubernetes/config.yaml"]


@pytest.mark.parametrize("path", EXAMPLES)
def test_examples_name_the_alias_and_no_method(path):
    """The source of a migration is not corrected, and a method overrides what tune chose."""
    text = (ROOT / path).read_text()
    tables = [part.split("```")[0] for part in text.split("[[collection]]")[1:]]
    assert tables
    for table in tables:
        keys = re.findall(r"^\s*(\w+) = (\S+)", table.split("---")[0], re.MULTILINE)
        assert dict(keys)["name"] == '"live"'
        assert not {"method", "params"} & dict(keys).keys()


def test_many_collections_read_a_shared_file_once(tmp_path, monkeypatch):
    np.save(tmp_path / "past.npy", np.ones((3, 4)))
    reads = []
    load = config_file_module.QueryBank.load
    monkeypatch.setattr(
        config_file_module.QueryBank, "load", lambda *args: reads.append(args) or load(*args)
    )
    text = "".join(
        f'[[collection]]\nname = "c{n}"\nbank = "{("past", "none")[n % 2]}.npy"\n' for n in range(8)
    )
    assert [fault.path[1] for fault in file_faults(config_file(tmp_path, text))] == [1, 3, 5, 7]
    assert len(reads) == 2


DEEP = "a" + ".a" * 20_000 + " = 1"


@pytest.mark.parametrize(
    "text",
    [
        "a = " + "[" * 20_000,
        "a = " + "{a=" * 20_000,
        DEEP,
        f'[[collection]]\nname = "a"\nmethod = "nnn"\nparams = {{ {DEEP} }}',
        f"[[collection]]\nname = {{ {DEEP} }}",
        f'[[collection]]\nname = "a"\nfill = {{ {DEEP} }}',
        f'[[collection]]\nname = "a"\nfill = [{{ {DEEP} }}]',
    ],
)
def test_a_deep_file_is_one_line(tmp_path, text):
    with pytest.raises(InvalidConfig) as refused:
        config_file(tmp_path, text)
    assert len(str(refused.value)) < 500
    assert len(str(refused.value).splitlines()) <= 2


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(InvalidConfig, match=r"none.toml: no such file; check the path"):
        ConfigFile(tmp_path / "none.toml")


def test_files_that_are_missing_or_broken_are_told_with_their_paths(tmp_path):
    file = config_file(tmp_path, RIGHT + 'bank = "broken.npy"\n')
    (tmp_path / "broken.npy").write_bytes(b"not an array")
    lines = told(file.refusal(file_faults(file)), tmp_path)
    assert [path for path, _ in lines] == [
        "server.token_file",
        "collection[0].bank",
        "collection[1].bank",
    ]
    assert "past.npy: no such file" in lines[1][1]
    assert "cannot be read" in lines[2][1]
    (tmp_path / "token").write_text("sesame")
    np.save(tmp_path / "past.npy", np.ones((3, 4)))
    np.save(tmp_path / "broken.npy", np.ones((3, 4)))
    assert file_faults(file) == []


def test_a_prior_has_one_source_and_its_log_is_read_before_the_service_starts(tmp_path):
    np.savez(tmp_path / "clicks.npz", query=np.eye(3, dtype=np.float32), key=np.array([4, 4, 7]))
    text = '[[collection]]\nname = "products"\nprior_from = "clicks.npz"\nprior_weight = 0.2\n'
    file = config_file(tmp_path, text)
    assert not file_faults(file)
    [table] = file.config.collection
    options = table.refresh_options(None, full=True)
    assert (options.recipe.prior, options.recipe.prior_weight) == ({4: 2, 7: 1}, 0.2)
    assert table.refresh_options(None, full=False).recipe.prior is None, "the stored clicks count"

    missing = config_file(tmp_path, text.replace("clicks.npz", "gone.npz"))
    assert "gone.npz" in str(file_faults(missing))
    assert faults(tmp_path, text + 'prior = "sales"\n')[0][0] == "collection[0].prior_from"
    assert faults(tmp_path, text.replace("0.2", "-0.2"))[0][0] == "collection[0].prior_weight"


@pytest.mark.parametrize("also", ["clicks", "pairs"])
def test_keys_by_any_name_are_those_of_the_pairs_and_of_the_clicks(tmp_path, also):
    """The column may be in both files, or in one of them: the other has a usual name then."""
    for name in ("clicks", "pairs"):
        column = "sort" if name != also else "key"
        np.savez(tmp_path / f"{name}.npz", query=np.eye(2), **{column: np.array([4, 7])})
    text = '[[collection]]\nname = "products"\nprior_from = "clicks.npz"\npairs = "pairs.npz"\n'
    named = config_file(tmp_path, text + 'key_column = "sort"\n')
    assert not file_faults(named)
    options = named.config.collection[0].refresh_options(None, full=True)
    assert options.recipe.prior == {4: 1, 7: 1}
    assert options.judgements.keys == [(4,), (7,)]
    assert "sort" in str(file_faults(config_file(tmp_path, text)))
    alone = '[[collection]]\nname = "products"\nkey_column = "sort"\n'
    assert faults(tmp_path, alone)[0][0] == "collection[0].key_column"


def test_judgements_with_ids_are_read_before_the_service_starts(tmp_path):
    vectors = np.eye(3, dtype=np.float32)
    np.savez(tmp_path / "asked.npz", query_id=["a", "b", "c"], query=vectors)
    (tmp_path / "judged.qrels").write_text("a 0 4 1\nb 0 7 2\nb 0 4 1\nc 0 4 0\n")
    text = '[[collection]]\nname = "products"\npairs = "judged.qrels"\n'
    named = text + 'pairs_queries = "asked.npz"\n'
    file = config_file(tmp_path, named)
    assert not file_faults(file)
    [table] = file.config.collection
    judgements = table.refresh_options(None, full=True).judgements
    assert judgements.keys == [("4",), ("7", "4")]
    assert table.refresh_options(None, full=False).judgements is None

    measured = config_file(tmp_path, named + 'measure = "ndcg@10"\n').config.collection[0]
    assert table.refresh_options(None, full=True).measure == "R@1"
    assert measured.refresh_options(None, full=True).measure == "nDCG@10"
    [fault] = faults(tmp_path, named + 'measure = "precision"\n')
    assert fault == (
        "collection[0].measure",
        "the measure must be R@k, MRR, MAP or nDCG@k, not 'precision'",
    )

    [fault] = file_faults(config_file(tmp_path, text))
    assert fault.path == ("collection", 0, "pairs")
    assert "name a file that has both" in str(fault)
    [fault] = file_faults(config_file(tmp_path, named.replace("asked", "gone")))
    assert "gone.npz: no such file" in str(fault)
    alone = named.replace('pairs = "judged.qrels"\n', "")
    [fault] = faults(tmp_path, alone)
    assert fault[0] == "collection[0].pairs_queries"
    assert fault[1].startswith("has the vectors for pairs")


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("refit_share = 0", "must be greater than 0, not 0"),
        ("refit_share = -0.5", "must be greater than 0, not -0.5"),
        ("refit_share = 1.5", "must be less than or equal to 1, not 1.5"),
        ("refit_share = nan", "must be a finite number, not nan"),
        ('refit_share = "a fifth"', "must be a valid number, not 'a fifth'"),
        ("refit_share = true", "must be a valid number, not True"),
    ],
)
def test_a_share_for_refits_that_is_none_is_one_line(tmp_path, key, message):
    text = f'[[collection]]\nname = "products"\n{key}\n'
    assert faults(tmp_path, text) == [("collection[0].refit_share", message)]


def test_refits_are_decided_at_a_refresh(tmp_path):
    text = '[[collection]]\nname = "products"\n[[collection]]\nname = "songs"\nrefit_share = 0.5\n'
    products, songs = config_file(tmp_path, text).config.collection
    assert products.refresh_options(None, full=True).refit == 0.2
    assert songs.refresh_options(None, full=True).refit == 0.5
    assert songs.refresh_options(None, full=False).refit == "pending"
