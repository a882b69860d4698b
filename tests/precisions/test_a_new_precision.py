"A precision added by one file, bf16_again.py, appears everywhere: the tests are in seen_everywhere.py."

from helpers import assert_passes


def test_a_precision_in_one_file_is_seen_everywhere():
    assert_passes('-o', 'python_files=seen_*.py', 'tests/precisions/seen_everywhere.py')
