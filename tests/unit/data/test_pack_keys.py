"""Keys of packed clips, and the shares of several machines."""

from __future__ import annotations

from clap_zero.data.pack_keys import KeyMaker, Part, list_share


def test_a_hundred_thousand_equal_names_take_no_time():
    make = KeyMaker()
    keys = [make(f"{number}/audio.wav") for number in range(100_000)]
    assert keys[:3] == ["audio", "audio-2", "audio-3"] and len(set(keys)) == len(keys)
    assert make("AUDIO-3.wav") == "AUDIO-3-2"


def test_shares_are_the_whole_list_in_its_order():
    for num_items in (0, 1, 5, 64, 999, 100_000):
        for count in (1, 2, 7, 64):
            shares = [Part(number, count).share(num_items, 10) for number in range(1, count + 1)]
            assert [position for share in shares for position in share] == list(range(num_items))
            if num_items // count >= 80:
                assert all(share.start % 10 == 0 for share in shares)
                assert max(map(len, shares)) - min(map(len, shares)) <= 20


def test_keys_of_a_share_are_those_of_the_whole():
    names = [("train" if number % 3 else "test", f"{number % 7}.wav") for number in range(50)]
    whole = list_share(names, range(50))
    listings = [list_share(names, Part(number, 4).share(50, 5)) for number in range(1, 5)]
    assert [key for listing in listings for key in listing.keys] == whole.keys
    assert {listing.fingerprint for listing in listings} == {whole.fingerprint}
    assert list_share(names[::-1], range(50)).fingerprint != whole.fingerprint
