"""Tests of the ledger: one contract for every implementation, and what is particular to each."""

import pytest

pytest.register_assert_rewrite(f"{__name__}.contract", f"{__name__}.serving")
