"""A refresh as the terminal shows it."""

from milvus_hubness.cli.refresh import show_refresh
from milvus_hubness.jobs.refresh.biases import RefreshEvaluation
from milvus_hubness.jobs.refresh.run import RefreshResult


def refused(**facts):
    evaluation = {
        "items": 500,
        "queries": 1_200,
        "real_queries": False,
        "excess_answers": {"raw": 0.4712, "old": 0.2604, "new": 0.3},
        "noise": {"raw": 0.01, "old": 0.01},
        "skewness": {"raw": 2.5, "old": 1.994, "new": 1.208},
        "overlap": 0.8,
        "measure": "R@1",
        "measured": {},
        "gains": {},
        "objection": "excess answers taken by hubs rise",
    }
    judged = RefreshEvaluation(**evaluation | facts)
    return RefreshResult("products", "refused", judged.objection, 0, 0, 3, judged=judged)


def test_the_figure_that_decides_is_shown_with_its_queries(capsys):
    show_refresh(refused())
    shown = " ".join(capsys.readouterr().out.split())
    assert "Did not refresh products" in shown
    assert "excess answers taken by hubs raw 47.1%, old 26.0%, new 30.0%" in shown
    assert "1,200 held-out queries" in shown

    show_refresh(refused(real_queries=True, queries=97))
    assert "97 real queries" in capsys.readouterr().out


def test_json_has_all_figures():
    judged = refused().to_dict()["judged"]
    assert judged["excess_answers"]["new"] == 0.3
    assert judged["noise"] == {"raw": 0.01, "old": 0.01}
    assert judged["real_queries"] is False
