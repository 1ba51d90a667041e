"""Set-ups that add up are certified, within a bound that is not a hair wider than it must be."""

import pytest
from sound_setups import SOUND


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_set_up_is_certified(name: str) -> None:
    certificate = SOUND[name]().verify()
    assert certificate.equal, str(certificate)
    assert certificate.exit_code == 0
    assert all(control.told_apart for control in certificate.controls)
    assert len(certificate.controls) == 3


def test_there_are_more_than_twenty() -> None:
    assert len(SOUND) >= 20
