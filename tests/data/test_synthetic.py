from megatron_dsv41.data.synthetic import stdlib_files, stdlib_texts


def test_standard_library_is_found_in_order_without_tests():
    files = stdlib_files()
    names = {path.name for path in files}
    assert len(files) > 300 and {"dataclasses.py", "argparse.py", "ast.py"} <= names
    assert not any(part in ("test", "tests", "site-packages") for path in files for part in path.parts[-3:])
    assert files == stdlib_files()


def test_limit_stops_before_the_file_that_would_pass_it():
    whole = [len(text.encode()) for _, text in zip(range(40), stdlib_texts(), strict=False)]
    limit = sum(whole[:10]) + whole[10] - 1
    assert [len(text.encode()) for text in stdlib_texts(limit)] == whole[:10]
    assert sum(len(text.encode()) for text in stdlib_texts(limit + 1)) == limit + 1
