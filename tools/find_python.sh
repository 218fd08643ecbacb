#!/usr/bin/env bash
# Prints the path of a Python >= 3.12 that can make virtual environments, or says what to install.
#
# The default `python3` is often older, and a versioned name on PATH may be a shim that only prints an error, so each
# candidate is executed. 3.12 comes first: every pinned package has wheels for it.
set -u

works() {
    "$1" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1
}

if [ -n "${PYTHON:-}" ]; then
    if works "$PYTHON"; then
        command -v "$PYTHON"
        exit 0
    fi
    echo "PYTHON=$PYTHON is not a Python >= 3.12 with the venv module. Give another one, or leave PYTHON unset." >&2
    exit 1
fi

shopt -s nullglob
pyenv_versions="${PYENV_ROOT:-$HOME/.pyenv}/versions"
for version in 3.12 3.13 3.14; do
    for candidate in "$(command -v "python$version")" "$pyenv_versions/$version"*/bin/python; do
        if [ -n "$candidate" ] && works "$candidate"; then
            echo "$candidate"
            exit 0
        fi
    done
done
if works python3; then
    command -v python3
    exit 0
fi

cat >&2 <<'MESSAGE'
gtp needs Python 3.12 or newer (Megatron-Core does), and none was found: not as python3.12, python3.13, python3.14 or
python3 on PATH, and not among pyenv's versions. Install one, for example with
    apt-get install python3.12 python3.12-venv        (Debian, Ubuntu, where the release has it)
    pyenv install 3.12
    conda create -n py312 python=3.12
and run make again, if need be as: make PYTHON=/path/to/python3.12 ...
MESSAGE
exit 1
