"""``vlfit jobs`` reads squeue's lines and the last whole step of a run."""

from launcher.jobs import last_step, parse_queue, with_progress


def test_queue_lines_are_read_even_where_a_name_holds_the_separator():
    (job,) = parse_queue("12_3|RUNNING|1-02:00:00|/home/me/a dir|n[1-2]|a|b\n\n")
    assert (job.job_id, job.state, job.time_left, job.folder) == (
        "12_3",
        "RUNNING",
        "1-02:00:00",
        "/home/me/a dir",
    )
    assert (job.reason, job.name) == ("n[1-2]", "a|b")


def test_a_line_that_is_still_being_written_is_not_read(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    assert last_step(metrics) == {}
    metrics.write_text('{"step": 1, "loss": 2.5}\n{"step": 2, "lo')
    assert last_step(metrics) == {"step": 1, "loss": 2.5}


def test_the_run_of_a_job_is_the_one_that_its_log_names(tmp_path):
    (job,) = parse_queue(f"12|RUNNING|1:00|{tmp_path}|n1|name")
    assert with_progress(job).run is None
    run = tmp_path / "my runs" / "a"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text('{"step": 4, "loss": 0.5}\n')
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "slurm-12.log").write_text("job 12: restart 0\njob 12: run directory my runs/a\n")
    found = with_progress(job)
    assert (found.run, found.step, found.loss) == (run, 4, 0.5)
