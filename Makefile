# make demo and make test need Python 3.10 or newer and nothing else: both set up .venv first.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-server test-long test-triton test-versions crash lint docs audit locks bills bench-gpu clean

demo: .venv/installed
	$(BIN)/milvus-hubness demo

# Bytecode is kept, whatever the environment says: every process that tests start imports the package. A test
# that fails runs once more, and the report names it: on a busy machine a server may answer too late.
test: .venv/installed-for-tests
	PYTHONDONTWRITEBYTECODE= $(BIN)/pytest --reruns 1

# All further cases on servers: Milvus 2.3.5, a model of 2.6, and with a Docker engine the current Milvus and Qdrant.
test-server: .venv/installed-for-tests
	$(BIN)/pytest -m "server and not long"

# The kernels of Triton in its interpreter, which needs no GPU but 0.7 GB that no other test does.
test-triton: .venv/installed-for-tests
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --group triton
	$(BIN)/pytest -n 0 tests/correction/kernels/test_buffered.py

# Units and Milvus Lite on every Python that is found, and on the oldest of them with the lowest versions that pyproject.toml
# allows. `make test-versions VERSIONS=3.12` tries one, LOWEST= leaves the lowest out, TESTS=tests/milvus/client takes a part.
# UV_TORCH_BACKEND=cpu spares gigabytes of CUDA where PyTorch's own index can be reached. Of pyenv's versions, only those are found
# that PYENV_VERSION=3.12.1:3.13.0 names.
VERSIONS ?= 3.10 3.11 3.12 3.13 3.14
LOWEST ?= $(firstword $(VERSIONS))
TESTS ?= tests
test-versions: .venv/installed-for-tests
	for version in $(VERSIONS); do \
		$(BIN)/uv python find --no-python-downloads $$version || \
			{ echo "Python $$version was not found, so that nothing was tried on it" >&2; continue; }; \
		$(MAKE) test-python VERSION=$$version OPTIONS='-c constraints.txt' || exit 1; \
	done
	test -z '$(LOWEST)' || $(MAKE) test-python VERSION=$(LOWEST) OPTIONS='--resolution lowest-direct'

test-python:
	$(BIN)/uv venv --clear --python $(VERSION) .venv-$(VERSION)
	$(BIN)/uv pip install --python .venv-$(VERSION) $(OPTIONS) -e '.[all]' -e integrations/langchain \
		-e integrations/qdrant -e integrations/haystack -e integrations/llamaindex --group test --group lint
	.venv-$(VERSION)/bin/python -m pytest -k 'not server' $(TESTS)

# What more would take make test beyond its time, and ten times as many examples of Hypothesis.
test-long: .venv/installed-for-tests
	$(BIN)/pytest -m "long or hypothesis" --hypothesis-profile long

# Ten minutes of jobs that overlap, then about an hour of kills; CHAOS_SEED=… repeats those of an earlier time.
crash: .venv/installed-for-tests
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.chaos

# On a machine with a CUDA device: the tests on it, and the kernels beside plain torch and FAISS.
bench-gpu: .venv/installed-for-tests
	$(BIN)/pytest -n 0 -m gpu tests/correction/kernels
	$(BIN)/python -m benchmarks.kernels_gpu --save

lint: .venv/installed-for-tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The documentation site, into site/; a broken link or a page that is in no menu fails.
docs: .venv/installed-for-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --clean

# Asks PyPI for known vulnerabilities of all that is installed, of what is in the images, and of a release's tools. PyPI
# knows no torch+cpu; its version is in constraints.txt.
audit: .venv/installed-for-audit
	$(BIN)/pip-audit --skip-editable --local
	$(BIN)/pip-audit --disable-pip --no-deps -r constraints.txt
	$(BIN)/pip-audit --disable-pip -r .github/build-tools/requirements.txt
	$(BIN)/pip-audit --disable-pip -r docker/locks/client.txt -r docker/locks/cpu.txt
	$(BIN)/pip-audit --disable-pip -r docker/locks/gpu.txt

# Writes the versions and hashes of what the images and a release's tools consist of, for the Python of docker/Dockerfile. All
# of CUDA is left out for CPUs; their build of torch is in docker/locks/torch-cpu.txt, which says how it is written.
IMAGE_PYTHON := 3.12
LOCK := $(BIN)/uv pip compile --quiet --universal --generate-hashes --custom-compile-command 'make locks'
LOCK_IMAGE := $(LOCK) --python-version $(IMAGE_PYTHON) -c constraints.txt pyproject.toml
locks: .venv/installed-for-tests
	$(LOCK) --python-version 3.10 -o .github/build-tools/requirements.txt .github/build-tools/requirements.in
	$(LOCK_IMAGE) -o docker/locks/client.txt
	$(LOCK_IMAGE) --extra serve --extra gpu --no-emit-package faiss-cpu -o docker/locks/gpu.txt
	excludes=$$(mktemp) && grep -oE '^(nvidia|cuda|triton)[a-z0-9-]*' docker/locks/gpu.txt > $$excludes && \
		$(LOCK_IMAGE) --extra serve --no-emit-package torch --excludes $$excludes -o docker/locks/cpu.txt && \
		rm $$excludes

# The bills of materials of the images, into bills/, with the tools of .github/build-tools: CI runs this on its own Python.
CYCLONEDX ?= cyclonedx-py
bills:
	mkdir -p bills
	cat docker/locks/cpu.txt docker/locks/torch-cpu.txt > bills/cpu.txt
	for image in client gpu; do cp docker/locks/$$image.txt bills; done
	for image in client cpu gpu; do \
		$(CYCLONEDX) requirements --pyproject pyproject.toml --output-reproducible --of JSON \
			-o bills/milvus-hubness-$$image.cdx.json bills/$$image.txt || exit 1; \
		rm bills/$$image.txt; \
	done

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[all]'
	touch $@

.venv/installed-for-tests: .venv/installed $(wildcard integrations/*/pyproject.toml)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		--group server --group test --group lint -e integrations/langchain -e integrations/qdrant -e integrations/haystack \
		-e integrations/llamaindex
	touch $@

.venv/installed-for-docs: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --group docs
	touch $@

.venv/installed-for-audit: .venv/installed $(wildcard integrations/*/pyproject.toml)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --group audit \
		-e integrations/langchain -e integrations/qdrant -e integrations/haystack -e integrations/llamaindex
	touch $@

clean:
	rm -rf .venv .venv-* dist build site bills
