"""A slice of `make conformance`: every operator in every dtype with a sample (another one for each
dtype; with more in `make test-all`), all bad inputs, and the declared exceptions with all samples.

The workers run ahead of pytest, through what was selected.
"""

import pytest
from declared import DECLARED, job_for, judge
from jobs import DTYPES, ERRORS, Pool, operators

FEW, MORE = 1, 4
KNOWN = operators()


def _jobs(name, dtypes, samples):
    return [job_for(name, dtype, samples) for dtype in dtypes]


def of_each_operator(samples, declared=True):
    """Jobs with a declared exception take all samples anyway."""
    jobs = [_jobs(name, has["dtypes"], samples) for name, has in KNOWN.items()]
    jobs = [[job for job in some if declared or job.limit == samples] for some in jobs]
    return pytest.mark.parametrize("jobs", jobs, ids=KNOWN)


@pytest.fixture(scope="session")
def results(request):
    """Gives a job's result, which may still be in the making."""
    with Pool() as pool:
        selected = [item for item in request.session.items if "jobs" in item.fixturenames]
        jobs = [job for item in selected for job in item.callspec.params["jobs"]]
        futures = {job: pool.submit(job) for job in jobs}
        yield lambda job: futures[job].result()


def _wrong(jobs, results):
    return [f"{job}: {sentence}" for job in jobs for sentence in judge(job, results(job))]


@of_each_operator(FEW)
def test_operator_agrees_with_the_cpu(jobs, results):
    assert not _wrong(jobs, results)


@pytest.mark.slow
@of_each_operator(MORE, declared=False)
def test_operator_agrees_with_the_cpu_on_more_samples(jobs, results):
    assert not _wrong(jobs, results)


def test_declared_exceptions_are_of_known_operators():
    assert {entry.op for entry in DECLARED} <= set(KNOWN)
    dtypes = {dtype for entry in DECLARED for dtype in entry.dtypes.split()}
    assert dtypes <= {"*", ERRORS, *DTYPES}


WITH_ERRORS = [name for name, has in KNOWN.items() if has["errors"]]


@pytest.mark.parametrize(
    "jobs", [_jobs(name, [ERRORS], MORE) for name in WITH_ERRORS], ids=WITH_ERRORS
)
def test_bad_inputs_fail_as_on_the_cpu(jobs, results):
    assert not _wrong(jobs, results)
