"""What is taken from the packages, and what is said about it: written by hand from the titles."""

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
GUITAR, BASS, VOICES = "an electric guitar", "a bass guitar", "human voices"

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
    Instrument("jazz guitar", GUITAR, "Jazz Guitar"),
    Instrument("clean electric guitar", GUITAR, "Clean Guitar"),
    Instrument("palm muted electric guitar", GUITAR, "Palm Muted Guitar"),
    Instrument("overdriven electric guitar", GUITAR, "Overdrive Guitar"),
    Instrument("distorted electric guitar", GUITAR, "Distortion Guitar"),
    Instrument("plucked double bass", PLUCKED, "Acoustic Bass"),
    Instrument("fingered bass guitar", BASS, "Fingered Bass"),
    Instrument("bass guitar played with a pick", BASS, "Picked Bass"),
    Instrument("fretless bass guitar", BASS, "Fretless Bass", "Fretless"),
    Instrument("slap bass guitar", BASS, "Slap Bass"),
    Instrument("popped bass guitar", BASS, "Pop Bass"),
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

# One recording a line: package key | kind of sound | caption | another | another. A star puts the recording into the
# test split. Electronic sounds and titles that do not say what sounds are left out.
FLUID_PERCUSSION = """
Timpani 1(L) | timpani | a low timpani drum | a kettledrum struck, low | an orchestral timpani stroke
Timpani 2(L) | timpani | a timpani drum of middle pitch | a kettledrum struck, middle pitch |
Timpani 3(L) | timpani | a high timpani drum | a kettledrum struck, high |
Tubular Bells C7(L) | bell | a tubular bell struck | tubular bells, one stroke |
Bottle Chiff C7(L) | wind sound | blowing across the mouth of a bottle | a bottle blown like a flute |
shakhchi c6(L) | bamboo flute | a shakuhachi, a Japanese bamboo flute | a note on a bamboo flute |
whistle | whistle | a person whistling a note | human whistling |
Tambourine(L) | tambourine | a tambourine struck | one hit of a tambourine |
Long Whistle | whistle | a long blast of a whistle | a samba whistle blown long |
Short Whistle | whistle | a short blast of a whistle | a samba whistle blown short |
Triangle | triangle | a triangle ringing | a metal triangle struck |
Sleigh Bells | bell | sleigh bells shaken | jingling sleigh bells |
Bell Tree | bell | a bell tree, many small bells | a glissando on a bell tree |
Vibra Slap | vibraslap | a vibraslap rattling | the rattle of a vibraslap |
Guiro Up(L) | guiro | a guiro scraped | scraping a guiro |
Quica Hi | cuica | a cuica, high | a high squeaking cuica drum |
Quica Low | cuica | a cuica, low | a low squeaking cuica drum |
Small Shaker (L) | shaker | a small shaker | shaking a small shaker |
High Woodblock(L) | wood block | a high woodblock | a small wood block struck |
Low Woodblock(L) | wood block | a low woodblock | a large wood block struck |
High Agogo(L) | agogo bell | a high agogo bell | striking a high agogo |
Low Agogo(L) | agogo bell | a low agogo bell | striking a low agogo |
Cow Bell(L) | cowbell | a cowbell struck | one hit on a cowbell |
Taiko Drum(L) | taiko drum | a taiko drum | one stroke on a Japanese taiko drum |
Long Taiko Hit | taiko drum | a long ringing taiko drum | a big Japanese drum, long |
Short Taiko Hit | taiko drum | a short taiko drum hit | a big Japanese drum, short |
High Conga(L) | hand drum | a high conga drum | one hit on a high conga |
Low Tumba(L) | hand drum | a low tumba conga drum | one hit on a low conga |
Low Bongo(L) | hand drum | a low bongo drum | one hit on a low bongo |
Bongo Rim(L) | hand drum | the rim of a bongo drum struck | a bongo rim hit |
High Timbale(L) | timbale | a high timbale drum | a hit on a high timbale |
Low Timbale(L) | timbale | a low timbale drum | a hit on a low timbale |
Clap(L) | clapping | a hand clap | hands clapped once |
Applause | applause | an audience applauding | applause |
Sea Shore | sea | waves at the sea shore | surf on a beach |
Bird | bird | a bird tweeting | a bird chirps |
Telephone | telephone | a telephone ringing | the ring of an old telephone |
Heli | helicopter | a helicopter rotor | a helicopter flying |
Gun | gunshot | a gun shot | someone fires a gun |
Orch Snare(L) | snare drum | an orchestral snare drum hit | |
Std Snr 1(L) | snare drum | a snare drum hit | a stroke on a snare drum |
Snr 1-1(L) | snare drum | a snare drum stroke | a hit on a snare drum |
Power Snare 1(L) | snare drum | a powerful snare drum hit with reverb | |
Brush Snr 1(L) | snare drum | a snare drum played with a brush | a brush on a snare drum |
Brush Swirl(L) | snare drum | a brush swirled on a snare drum | |
Std Kick 1(L) | bass drum | a kick drum hit | a bass drum of a drum kit |
Std Kick 7(L) | bass drum | a kick drum stroke | one beat of a kick drum |
Room Kick (L) | bass drum | a kick drum in a room | |
Orch Bass Drum(L) | bass drum | an orchestral bass drum | a stroke on a large concert bass drum |
Tom Floor(L) | tom drum | a floor tom drum hit | the lowest tom of a drum kit |
Tom Low(L) | tom drum | a low tom drum hit | |
Tom Med(L) | tom drum | a middle tom drum hit | |
Tom Hi(L) | tom drum | a high tom drum hit | |
Low Studio(L) | tom drum | a low tom drum in a studio | |
Hi Studio(L) | tom drum | a high tom drum in a studio | |
Hi-Hat Closed(L) | hi-hat | a closed hi-hat cymbal | a tick of a closed hi-hat |
Hi-Hat Half-Open(L) | hi-hat | a half open hi-hat cymbal | |
Hi-Hat Foot(L) | hi-hat | a hi-hat cymbal closed with the foot | |
Ride1(L) | cymbal | a ride cymbal | a stroke on a ride cymbal |
BellRide(R) | cymbal | the bell of a ride cymbal | |
Crsh 1(L) | cymbal | a crash cymbal | a crash cymbal ringing |
Crsh 2(L) | cymbal | a crash cymbal hit | a drum kit's crash cymbal |
China Crash(L) | cymbal | a china crash cymbal | |
Splash(L) | cymbal | a splash cymbal | |
Temple Block 1 f(L) | temple block | the highest temple block struck | |
Temple Block 3 f(L) | temple block | the middle temple block struck | |
Temple Block 5 f(L) | temple block | the lowest temple block struck | |
58_72_FULLCRASH1 | marching cymbals | a full crash of marching cymbals | a pair of cymbals clashed |
58_93_ROLL1 | marching cymbals | a roll on marching cymbals | |
58_91_ZING1 | marching cymbals | a zing of marching cymbals | |
57_0_BD1NORM | marching drum | a marching bass drum | |
55_48_TNR3_NORM | marching drum | a marching tenor drum | |
56_50_SNR_NORM_WHOL | marching drum | a marching snare drum | |
"""

OPENSFX = """
3 | whistle | a factory whistle | the steam whistle of a factory |
4 | train | a steam train whistle at a station | a steam locomotive whistles |
6 | horn | a ship's horn | the horn of a big ship |
7 | horn | a ferry's horn | a ferry sounds its horn |
8 | aeroplane | a propeller plane starting | the engine of a small aeroplane starts |
9 | aeroplane | a passenger jet taking off | a jet airliner departs |
10 | train | the horn of a diesel locomotive | a distant train horn |
11 | machine | the machinery of a lift | an elevator running |
12 | electric sparks | electric sparks crackling | an electric arc buzzing |
14 | bell | the bell of a railway level crossing | a warning bell at a railroad crossing |
17 | crash | a crash | something crashes |
20 | cash register | a cash till opening | an old cash register rings |
24 | helicopter | a helicopter | a helicopter in flight |
25 | road vehicle | a truck starting and pulling away | an old bus pulls away |
27 | road vehicle | a modern bus starting | a city bus approaches and leaves |
28 | road vehicle | an old bus starting | the engine of an old bus starts |
29 | applause | applause of an enthusiastic audience | a crowd clapping and cheering |
33 | power tool | a jackhammer | an air hammer at work |
35 | horn | a car horn | a car honks |
36 | sheep | a sheep bleating | a sheep |
37 | cow | a cow mooing | a cow |
38 | horse | a horse neighing | the neigh of a horse |
39 | hammering | hammering in a smithy | a blacksmith hammers on metal |
40 | power tool | a circular saw cutting wood | a saw in a sawmill |
51 | bubbles | bubbles in a liquid | bubbling water |
52 | wind | wind blowing | the sound of wind |
54 | tree | a tree crashing to the ground | a tree falls down |
55 | tree | a tree being cut and falling | cutting a tree |
56 | power tool | a chainsaw | a chainsaw running |
59 | aeroplane | a jet plane close by | a fast jet passing |
61 | aeroplane | a fighter jet flying past | navy jets in the air |
65 | train | a metro train departing | an underground train |
66 | bird | a tropical bird calling | a bird call |
67 | growl | a growl like a lion's roar | someone growls like a lion |
68 | monkey | monkeys screaming | a monkey shrieks |
69 | aeroplane | an aeroplane propeller | a propeller plane taking off |
71 | train | a train passing by | a train passes |
72 | bird | a bird of the tropics singing | birdsong |
"""

SCRATCH = """
Animal/Bird | bird | a bird chirping | a short chirp of a bird |
Animal/Cat | cat | a cat | the voice of a cat |
Animal/Cricket | cricket | a cricket chirping once | |
Animal/Crickets | cricket | crickets chirping | many crickets at night |
Animal/Dog1 | dog | a dog barking | a dog barks |
Animal/Dog2 | dog | a bark of a dog | one bark of a dog |
Animal/Duck | duck | a duck quacking | the quack of a duck |
Animal/Goose | goose | a goose honking | a goose |
Animal/Horse | horse | a horse whinnying | a horse |
Animal/HorseGallop | horse hooves | a horse galloping | the hooves of a galloping horse |
Animal/Kitten | cat | a kitten mewing | a young cat |
Animal/Meow | cat | a cat meowing | a meow |
Animal/Owl | owl | an owl hooting | an owl |
Animal/Rooster | rooster | a rooster crowing | a cock crows |
Animal/SeaLion | sea lion | a sea lion barking | the call of a sea lion |
Animal/WolfHowl | wolf | a wolf howling | the howl of a wolf |
Effects/BalloonScratch | balloon | scratching on a balloon | rubbing a balloon |
Effects/BellToll | bell | a bell tolling | a large bell rings |
Effects/Bubbles | bubbles | bubbles rising in water | water bubbling |
Effects/CarPassing | road vehicle | a car passing by | a car drives past |
Effects/DoorClose | door | a door closing | someone closes a door |
Effects/DoorCreak | door | a door creaking | a creaking door |
Effects/MotorcyclePassing | road vehicle | a motorcycle passing by | a motorbike drives past |
Effects/Plunge | water | something plunging into water | a plunge into water |
Effects/Rattle | rattle | a rattle | something rattles |
Effects/Ripples | water | ripples on water | water rippling |
Effects/SewingMachine | machine | a sewing machine | a sewing machine running |
Effects/Typing | typing | typing on a keyboard | someone types |
Effects/WaterDrop | water | a drop of water falling | a water drop |
Effects/WaterRunning | water | water running | running water from a tap |
Human/BabyCry | baby | a baby crying | an infant cries |
Human/Cough-female | cough | a woman coughing | a woman coughs |
Human/Cough-male | cough | a man coughing | a man coughs |
Human/FingerSnap | finger snap | a snap of the fingers | someone snaps a finger |
Human/Footsteps-1 | footsteps | footsteps | someone walking |
Human/Footsteps-2 | footsteps | the footsteps of a person | a person walks |
Human/Laugh-female | laughter | a woman laughing | a woman laughs |
Human/Laugh-male1 | laughter | a man laughing | a man laughs |
Human/Laugh-male2 | laughter | the laughter of a man | a laughing man |
* Human/Laugh-male3 | laughter | a man laughing | a man laughs | the laughter of a man
Human/PartyNoise | crowd | people talking at a party | the noise of a party |
Human/Scream-female | scream | a woman screaming | a woman screams |
Human/Scream-male1 | scream | a man screaming | a man screams |
Human/Scream-male2 | scream | a scream of a man | a man cries out |
Human/Slurp | slurping | a person slurping | someone slurps a drink |
Human/Sneeze-female | sneeze | a woman sneezing | a woman sneezes |
Human/Sneeze-male | sneeze | a man sneezing | a man sneezes |
Instruments/Dijjeridoo | didgeridoo | a didgeridoo | someone plays a didgeridoo |
Instruments/GuitarStrum | guitar chord | a guitar strummed | a strummed guitar chord |
Instruments/Tambura | tambura | a tambura | an Indian tambura droning |
Percussion/CymbalCrash | cymbal | a cymbal crash | a crashing cymbal |
Percussion/Gong | gong | a gong | a stroke on a gong |
* Percussion/RideCymbal | cymbal | a ride cymbal | a stroke on a ride cymbal |
Percussion/Shaker | shaker | a shaker | a shaker shaken |
Music Loops/HumanBeatbox1 | beatbox | a person beatboxing | human beatbox, drums made with the mouth |
Music Loops/HumanBeatbox2 | beatbox | a beatboxing person | drum sounds made with the mouth |
Music Loops/GuitarChords1 | guitar chord | chords on a guitar | someone plays guitar chords |
Music Loops/GuitarChords2 | guitar chord | guitar chords | a guitar playing chords |
"""

SONIC_PI = """
misc_burp | burp | a burp | someone burps |
misc_crow | bird | a crow cawing | the caw of a crow |
perc_till | cash register | a till ringing up | a cash register |
perc_snap | finger snap | fingers snapping | a finger snap |
perc_door | door | a door shutting | a door |
ambi_sauna | sauna | inside a sauna | the sound of a sauna |
vinyl_hiss | vinyl record | the hiss of a vinyl record | crackling of a record |
vinyl_scratch | vinyl record | scratching a vinyl record | a record scratch |
vinyl_rewind | vinyl record | a vinyl record spun backwards | rewinding a record |
loop_3d_printer | machine | a 3D printer at work | the motors of a 3D printer |
guit_harmonics | guitar chord | harmonics on a guitar | guitar harmonics |
drum_roll | snare drum | a drum roll | a roll on a snare drum |
* drum_snare_hard | snare drum | a snare drum hit hard | a hard stroke on a snare drum |
* drum_bass_hard | bass drum | a bass drum hit hard | a hard kick on a bass drum |
drum_heavy_kick | bass drum | a heavy kick drum | |
* drum_tom_lo_hard | tom drum | a low tom drum hit hard | |
* drum_tom_hi_hard | tom drum | a high tom drum hit hard | |
* drum_cymbal_hard | cymbal | a cymbal hit hard | a hard stroke on a cymbal |
drum_cymbal_open | hi-hat | an open hi-hat cymbal | |
drum_splash_hard | cymbal | a splash cymbal hit hard | |
drum_cowbell | cowbell | a cowbell | the clank of a cowbell |
tabla_ghe1 | tabla | a tabla playing the bass stroke ghe | the stroke ghe on a tabla |
tabla_ghe2 | tabla | a ghe stroke on the tabla | |
tabla_ghe6 | tabla | the tabla stroke ghe, long | |
* tabla_ghe7 | tabla | the tabla stroke ghe | a ghe stroke on the tabla | a tabla playing ghe
tabla_tun1 | tabla | a tabla playing the stroke tun | the stroke tun on a tabla |
tabla_tun3 | tabla | a tun stroke on the tabla | |
* tabla_tun2 | tabla | the tabla stroke tun | a tun stroke on the tabla | a tabla playing tun
tabla_tas1 | tabla | a tabla playing the stroke tas | the stroke tas on a tabla |
tabla_tas3 | tabla | a tas stroke on the tabla | |
* tabla_tas2 | tabla | the tabla stroke tas | a tas stroke on the tabla | a tabla playing tas
tabla_na | tabla | the tabla stroke na | a na stroke on the tabla |
tabla_na_o | tabla | the open tabla stroke na | a tabla playing an open na |
tabla_te2 | tabla | the tabla stroke te | a te stroke on the tabla |
loop_tabla | tabla | a tabla playing a rhythm | a rhythm on tabla drums |
"""
