"""`python -m longspan`: the `longspan` command where its script is not on the path."""

from longspan.cli import app

if __name__ == "__main__":
    app(prog_name="longspan")
