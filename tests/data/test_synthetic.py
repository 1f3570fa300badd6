from megatron_dsv41.data.synthetic import stdlib_files, stdlib_texts


def test_standard_library_is_found_in_order_without_tests():
    files = stdlib_files()
    names = {path.name for path in files}
    assert len(files) > 300 and {"dataclasses.py", "argparse.py", "ast.py"} <= names
    assert not any(part in ("test", "tests", "site-packages") for path in files for part in path.parts[-3:])
    assert files == stdlib_files()


def test_texts_are_the_files():
    texts = stdlib_texts()
    for path, text in zip(stdlib_files()[:20], texts, strict=False):
        assert text == path.read_text(encoding="utf-8")
