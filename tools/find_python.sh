#!/usr/bin/env bash
# Prints the path of a Python that can host the environment: >= 3.12, able to make virtual environments.
# Looks at $PYTHON, PATH, pyenv and uv. Every candidate is run, because a pyenv shim of a version that is not
# selected exists and fails. 3.12 is preferred: the dependencies ship wheels for it.
# Exit 1, with what was seen and what to install on standard error, when there is none.
set -u

seen=""
have_uv=""
command -v uv >/dev/null 2>&1 && have_uv=1

probe() { # path: sets `version` (major.minor) when usable, else notes the reason in `seen` and fails
    local answer
    answer=$("$1" -I -c '
import sys
version = "%d.%d" % sys.version_info[:2]
if sys.version_info < (3, 12):
    print("is Python " + version)
    sys.exit(1)
try:
    import ensurepip, venv
except ImportError as error:
    if not sys.argv[1]:
        print("Python " + version + " lacks the module " + str(error.name))
        sys.exit(1)
print(version)' "$have_uv" 2>/dev/null </dev/null) && { version=$answer; return 0; }
    seen+="  $1: ${answer:-does not run (a pyenv shim of a version that is not selected?)}"$'\n'
    return 1
}

candidates() { # in order of preference within one minor version
    local name root
    for name in python3.12 python3.13 python3.14 python3 python; do
        type -aP "$name" 2>/dev/null
    done
    for root in "${PYENV_ROOT:-}" "${HOME:-}/.pyenv" /opt/pyenv; do
        [ -n "$root" ] && ls -d "$root"/versions/3.*/bin/python3 2>/dev/null
    done
    ls -d /usr/local/bin/python3.1[2-9] /opt/homebrew/bin/python3.1[2-9] /opt/python*/bin/python3 2>/dev/null
    [ -n "$have_uv" ] && uv python find --no-project '>=3.12' 2>/dev/null
    ls -d "${UV_PYTHON_INSTALL_DIR:-${HOME:-}/.local/share/uv/python}"/*/bin/python3 2>/dev/null
    return 0
}

if [ -n "${PYTHON:-}" ]; then
    if path=$(type -P "$PYTHON") && probe "$path"; then
        echo "$path"
        exit 0
    fi
    printf 'PYTHON=%s cannot be used:\n%s' "$PYTHON" "${seen:-  it is not a program$'\n'}" >&2
    printf 'Point PYTHON at a Python >= 3.12 with the venv module, or unset it.\n' >&2
    exit 1
fi

best=""
best_version=""
while IFS= read -r path; do
    [ -x "$path" ] || continue
    case "$seen" in *"  $path: "*) continue ;; esac
    probe "$path" || continue
    if [ "$version" = 3.12 ]; then
        echo "$path"
        exit 0
    fi
    if [ -z "$best" ] || [ "${version#3.}" -lt "${best_version#3.}" ]; then
        best=$path
        best_version=$version
    fi
done < <(candidates)

if [ -n "$best" ]; then
    echo "$best"
    exit 0
fi

{
    echo "No Python >= 3.12 with venv support was found on PATH, in pyenv or in uv."
    [ -n "$seen" ] && printf 'What was looked at:\n%s' "$seen"
    echo "Install one of:"
    echo "  Debian, Ubuntu:  apt-get install python3.12 python3.12-venv python3.12-dev"
    echo "  pyenv:           pyenv install 3.12"
    echo "  uv:              uv python install 3.12"
    echo "or name one:       make setup PYTHON=/path/to/python3.12"
} >&2
exit 1
