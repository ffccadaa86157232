"""Which instruments are taken from the soundfont, and what is said about their notes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Instrument:
    """The notes of one instrument of the soundfont.

    Attributes:
        label: Name of the kind of sound.
        family: What kind of instrument it is, with its article.
        font_name: The soundfont's instrument.
        prefix: Samples of other instruments, borrowed to fill the keyboard, are left out: names must start with this.
        subject: Who plays, with article; "a <label>" by default.
        verb: What is done with the note.
    """

    label: str
    family: str
    font_name: str
    prefix: str = ""
    subject: str = ""
    verb: str = "playing"

    def captions(self, note: str, register: str) -> tuple[str, str, str]:
        """Three ways to say the same, for a note such as "C#3" that lies in a "low", "middle" or "high" register."""
        article = "an" if self.label[0] in "aeiou" else "a"
        subject = self.subject or f"{article} {self.label}"
        preposition = "sung by" if self.verb.startswith("singing") else "on"
        return (
            f"{subject} {self.verb} the note {note}",
            f"the note {note} {preposition} {subject}",
            f"{self.family}, {self.label}, {register} note {note}",
        )


KEYS, PLUCKED, BOWED = "a keyboard instrument", "a plucked string instrument", "a bowed string instrument"
STRUCK, ORGAN, REED = "a struck percussion instrument", "an organ", "a woodwind instrument with a reed"
FLUTES, BRASS, FREE_REED = "a wind instrument without a reed", "a brass instrument", "a free reed instrument"
AMPLIFIED, VOICES = "an amplified plucked string instrument", "human voices"

INSTRUMENTS = (
    Instrument("piano", KEYS, "Yamaha Grand Piano"),
    Instrument("electric piano", KEYS, "Electric Piano"),
    Instrument("Rhodes electric piano", KEYS, "Rhodes EP 1"),
    Instrument("harpsichord", KEYS, "Harpsichord"),
    Instrument("clavinet", KEYS, "Clavinet"),
    Instrument("celesta", KEYS, "Celesta"),
    Instrument("glockenspiel", STRUCK, "Glockenspiel"),
    Instrument("music box", "a mechanical instrument", "Music Box"),
    Instrument("marimba", STRUCK, "Marimba"),
    Instrument("xylophone", STRUCK, "Xylophone"),
    Instrument("steel drum", STRUCK, "Steel Drum"),
    Instrument("kalimba", "a plucked thumb piano", "Kalimba"),
    Instrument("hammered dulcimer", "a struck string instrument", "Dulcimer"),
    Instrument("Hammond organ", ORGAN, "Percussive Organ"),
    Instrument("rock organ", ORGAN, "Rock Organ"),
    Instrument("church organ", ORGAN, "Church Organ"),
    Instrument("accordion", FREE_REED, "Accordian"),
    Instrument("harmonica", FREE_REED, "Harmonica"),
    Instrument("nylon string guitar", PLUCKED, "Nylon Guitar", "Nylon"),
    Instrument("steel string guitar", PLUCKED, "Steel String Guitar", "Steel"),
    Instrument("jazz guitar", AMPLIFIED, "Jazz Guitar"),
    Instrument("clean electric guitar", AMPLIFIED, "Clean Guitar"),
    Instrument("palm muted electric guitar", AMPLIFIED, "Palm Muted Guitar"),
    Instrument("overdriven electric guitar", AMPLIFIED, "Overdrive Guitar"),
    Instrument("distorted electric guitar", AMPLIFIED, "Distortion Guitar"),
    Instrument("plucked double bass", PLUCKED, "Acoustic Bass"),
    Instrument("fingered bass guitar", AMPLIFIED, "Fingered Bass"),
    Instrument("picked bass guitar", AMPLIFIED, "Picked Bass"),
    Instrument("fretless bass guitar", AMPLIFIED, "Fretless Bass", "Fretless"),
    Instrument("slap bass guitar", AMPLIFIED, "Slap Bass"),
    Instrument("popped bass guitar", AMPLIFIED, "Pop Bass"),
    Instrument("violin", BOWED, "Violin"),
    Instrument("viola", BOWED, "Viola"),
    Instrument("cello", BOWED, "Cello"),
    Instrument("double bass", BOWED, "Contrabass", "Bass"),
    Instrument("string orchestra", "a section of bowed strings", "Strings"),
    Instrument("pizzicato strings", "a section of plucked strings", "Pizzicato", "", "a string section", "plucking"),
    Instrument("harp", PLUCKED, "Orchestral Harp"),
    Instrument("banjo", PLUCKED, "Banjo"),
    Instrument("sitar", PLUCKED, "Sitar"),
    Instrument("koto", PLUCKED, "Koto"),
    Instrument("shamisen", PLUCKED, "Shamisen"),
    Instrument("choir singing ah", VOICES, "Ahh Choir", "", "a choir", "singing ah on"),
    Instrument("voices singing oh", VOICES, "Ohh Voices", "", "a group of voices", "singing oh on"),
    Instrument("trumpet", BRASS, "Trumpet"),
    Instrument("muted trumpet", BRASS, "Muted Trumpet"),
    Instrument("trombone", BRASS, "Trombone"),
    Instrument("tuba", BRASS, "Tuba"),
    Instrument("French horns", BRASS, "French Horns", "", "a section of French horns"),
    Instrument("brass section", "several brass instruments", "Brass Left"),
    Instrument("soprano saxophone", REED, "Soprano Sax"),
    Instrument("alto saxophone", REED, "Alto Sax"),
    Instrument("tenor saxophone", REED, "Tenor Sax"),
    Instrument("baritone saxophone", REED, "Baritone", "Baritone"),
    Instrument("oboe", REED, "Oboe"),
    Instrument("English horn", REED, "English Horn", "", "an English horn"),
    Instrument("bassoon", REED, "Bassoon"),
    Instrument("clarinet", REED, "Clarinet"),
    Instrument("piccolo", FLUTES, "Piccolo"),
    Instrument("flute", FLUTES, "Flute"),
    Instrument("recorder", FLUTES, "Recorder"),
    Instrument("pan flute", FLUTES, "Pan Flute"),
    Instrument("ocarina", FLUTES, "Ocarina"),
    Instrument("bagpipes", REED, "BagPipe", "", "bagpipes"),
)
