use std::io::Write;

use lz4_flex::frame::{BlockMode, BlockSize, FrameEncoder, FrameInfo};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use rdmux_wire::accel::{
    AcceleratorInfo, Algorithm, DATA_OFFSET, Header, JOB_LEN, Job, JobKind, JobStatus, Outcome,
};

use crate::{Core, Refusal, Window, level_range};

const WINDOW: u64 = 1 << 18;

fn info(algorithm: Algorithm) -> AcceleratorInfo {
    AcceleratorInfo {
        algorithm,
        level: level_range(algorithm).map_or(0, |(_, level)| level),
        windows: 1,
        window_bytes: WINDOW,
    }
}

fn core(algorithm: Algorithm) -> Core {
    Core::new(algorithm, level_range(algorithm).map_or(0, |(_, level)| level))
}

fn job(algorithm: Algorithm, kind: JobKind, length: usize) -> Job {
    Job {
        kind,
        algorithm,
        level: 0,
        id: 7,
        length: length as u32,
        align: 0,
    }
}

/// Returns a window's bytes with a header and data, up to the end of the last block.
fn image(job: Job, data: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; DATA_OFFSET as usize];
    Header { job, outcome: None }.emit(&mut bytes);
    bytes.extend(data);
    bytes.resize(bytes.len().next_multiple_of(512), 0xee);
    bytes
}

fn outcome(window: &Window) -> Option<Outcome> {
    let mut header = [0; JOB_LEN];
    window.read(0, &mut header);
    Header::parse(&header).ok()?.outcome
}

/// Returns the bytes of a window after its header's page.
fn result(window: &Window, len: usize) -> Vec<u8> {
    let mut bytes = vec![1; len];
    window.read(DATA_OFFSET, &mut bytes);
    bytes
}

/// Runs a job whole. Returns its outcome and its result.
fn run(core: &mut Core, job: Job, data: &[u8]) -> (Outcome, Vec<u8>) {
    let (mut window, info) = (Window::default(), info(job.algorithm));
    let number = window.write(&info, 0, &image(job, data)).unwrap().unwrap();
    let started = window.take(number).unwrap();
    assert_eq!(started.job, job);
    window.finish(core.run(started));
    let outcome = outcome(&window).unwrap();
    (outcome, result(&window, outcome.length as usize))
}

/// Returns bytes that compress somewhat.
fn text(random: &mut ChaCha8Rng, len: usize) -> Vec<u8> {
    let words: Vec<u32> = (0..64).map(|_| random.next_u32()).collect();
    let mut bytes = Vec::new();
    while bytes.len() < len {
        let word = words[random.next_u32() as usize % words.len()];
        bytes.extend(word.to_le_bytes());
        bytes.push(random.next_u32() as u8);
    }
    bytes.truncate(len);
    bytes
}

const COMPRESSORS: [Algorithm; 3] = [Algorithm::Deflate, Algorithm::Zstd, Algorithm::Lz4];

#[test]
fn core__decompresses_what_it_has_compressed() {
    let mut random = ChaCha8Rng::seed_from_u64(1);
    for algorithm in COMPRESSORS {
        let mut core = core(algorithm);
        for length in [0, 1, 511, 512, 100_000, 150_000] {
            for align in [0, 512, 4096, 65536] {
                let data = text(&mut random, length);
                let compress = Job {
                    align,
                    ..job(algorithm, JobKind::Compress, length)
                };
                let (done, packed) = run(&mut core, compress, &data);
                let what = format!("{algorithm:?}, {length} bytes, align {align}");
                assert_eq!(
                    (done.status, done.consumed as usize),
                    (JobStatus::Done, length),
                    "{what}"
                );
                assert!(
                    align == 0 || packed.len().is_multiple_of(align as usize),
                    "{what}"
                );
                // Two of them, one behind the other, are such data as well.
                let twice = [&packed[..], &packed[..]].concat();
                for (packed, times) in [(&packed, 1), (&twice, 2)] {
                    if packed.len() > WINDOW as usize - 4096 {
                        continue;
                    }
                    let decompress = job(algorithm, JobKind::Decompress, packed.len());
                    let (done, unpacked) = run(&mut core, decompress, packed);
                    assert_eq!(done.status, JobStatus::Done, "{what}");
                    let whole = times * length <= WINDOW as usize - 4096;
                    let times = if whole { times } else { 1 };
                    assert!(whole == (done.consumed as usize == packed.len()), "{what}");
                    assert!(unpacked == data.repeat(times), "{what}");
                }
            }
        }
    }
}

#[test]
fn core__bounds_its_result_by_the_window() {
    let mut random = ChaCha8Rng::seed_from_u64(2);
    let len = WINDOW as usize - 4096;
    let mut noise = vec![0; len];
    random.fill_bytes(&mut noise);
    for algorithm in COMPRESSORS {
        let mut core = core(algorithm);
        let (done, _) = run(&mut core, job(algorithm, JobKind::Compress, len), &noise);
        assert_eq!(
            (done.status, done.length),
            (JobStatus::TooLong, 0),
            "{algorithm:?}"
        );
        let max = info(algorithm).compress_max() as usize;
        let compress = Job {
            align: 65536,
            ..job(algorithm, JobKind::Compress, max)
        };
        let (done, _) = run(&mut core, compress, &noise[..max]);
        assert_eq!(done.status, JobStatus::Done, "{algorithm:?}");
    }
}

#[test]
fn core__refuses_bombs_and_what_is_cut_short_or_changed() {
    // A window of another core, with more room, makes what does not fit here.
    let bomb = vec![0; 16 << 20];
    let mut large = Vec::new();
    for algorithm in COMPRESSORS {
        let mut codec = crate::frames::Codec::new(algorithm).unwrap();
        large.resize(4 << 20, 0);
        let length = codec.compress(&bomb, 1, 0, &mut large).unwrap();
        let mut core = core(algorithm);
        let decompress = |length| job(algorithm, JobKind::Decompress, length);
        assert!(length < WINDOW as usize - 4096, "{algorithm:?}: {length}");
        let (done, _) = run(&mut core, decompress(length), &large[..length]);
        assert_eq!(done.status, JobStatus::TooLong, "{algorithm:?}");

        let data = text(&mut ChaCha8Rng::seed_from_u64(3), 50_000);
        let (_, packed) = run(&mut core, job(algorithm, JobKind::Compress, data.len()), &data);
        for cut in [1, 3, 9, 15, packed.len() / 2, packed.len() - 1] {
            let (done, _) = run(&mut core, decompress(cut), &packed[..cut]);
            assert!(
                matches!(done.status, JobStatus::Truncated | JobStatus::Corrupt),
                "{algorithm:?}, {cut} of {}: {done:?}",
                packed.len()
            );
        }
        let (done, _) = run(&mut core, decompress(1000), &data[..1000]);
        assert_eq!(done.status, JobStatus::Corrupt, "{algorithm:?}");
    }
}

/// Frames with changed bytes neither panic nor write beyond the window; what is reported as done fits.
#[test]
fn core__survives_hostile_frames() {
    for seed in 0..3000 {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let algorithm = COMPRESSORS[seed as usize % 3];
        let mut core = core(algorithm);
        let length = random.next_u32() as usize % 5000;
        let data = text(&mut random, length);
        let compress = Job {
            align: [0, 512][random.next_u32() as usize % 2],
            ..job(algorithm, JobKind::Compress, length)
        };
        let (_, mut packed) = run(&mut core, compress, &data);
        for _ in 0..1 + random.next_u32() % 4 {
            // The header most of all.
            let range = [16, packed.len()][random.next_u32() as usize % 2];
            let at = random.next_u32() as usize % range;
            packed[at] = random.next_u32() as u8;
        }
        let (done, _) = run(
            &mut core,
            job(algorithm, JobKind::Decompress, packed.len()),
            &packed,
        );
        assert!(done.status.is_over(), "seed {seed}");
        assert!(
            u64::from(done.length) <= WINDOW - DATA_OFFSET && done.consumed as usize <= packed.len(),
            "seed {seed}"
        );
    }
}

#[test]
fn core__checksums_and_passes() {
    let data = b"123456789";
    let mut crc = core(Algorithm::Crc32c);
    let (done, _) = run(&mut crc, job(Algorithm::Crc32c, JobKind::Checksum, 9), data);
    assert_eq!((done.checksum, done.length, done.consumed), (0xe306_9283, 0, 9));
    let mut crc = core(Algorithm::Crc64Nvme);
    let (done, _) = run(&mut crc, job(Algorithm::Crc64Nvme, JobKind::Checksum, 9), data);
    assert_eq!(done.checksum, 0xae8b_1486_0a79_9888);
    let mut null = core(Algorithm::Null);
    let (done, result) = run(&mut null, job(Algorithm::Null, JobKind::Pass, 9), data);
    assert_eq!((done.length, &result[..]), (9, &data[..]));
}

#[test]
fn window__takes_parts_in_any_order() {
    for seed in 0..200 {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let mut window = Window::default();
        // Windows are used again: what was there before does not show.
        for round in 0..3u64 {
            let length = random.next_u32() as usize % 100_000;
            let data = text(&mut random, length);
            let pass = Job {
                id: round,
                ..job(Algorithm::Null, JobKind::Pass, length)
            };
            let bytes = image(pass, &data);
            let mut parts = Vec::new();
            let mut at = 0;
            while at < bytes.len() {
                let blocks = 1 + random.next_u32() as usize % 40;
                let end = (at + blocks * 512).min(bytes.len());
                parts.push(at..end);
                // A host may send one twice, if it has lost the answer.
                if random.next_u32().is_multiple_of(4) {
                    parts.push(at..end);
                }
                at = end;
            }
            for number in (1..parts.len()).rev() {
                parts.swap(number, random.next_u32() as usize % (number + 1));
            }
            let mut started = None;
            for part in parts {
                if started.is_some() {
                    let again = window.write(&info(Algorithm::Null), part.start as u64, &bytes[part]);
                    assert!(matches!(again, Err(Refusal::Sequence)), "seed {seed}");
                    continue;
                }
                started = window
                    .write(&info(Algorithm::Null), part.start as u64, &bytes[part])
                    .unwrap();
                let shown = result(&window, 8192);
                assert!(
                    shown.iter().all(|byte| *byte == 0),
                    "seed {seed}: nothing shows before it is done"
                );
            }
            let number = started.unwrap_or_else(|| panic!("seed {seed}: its last part starts a job"));
            assert_eq!(outcome(&window).unwrap().status, JobStatus::Running);
            let started = window.take(number).unwrap();
            window.finish(core(Algorithm::Null).run(started));
            let mut expected = data;
            expected.resize(120_000, 0);
            assert!(
                result(&window, 120_000) == expected,
                "seed {seed}: the result, and zeros behind it"
            );
        }
    }
}

#[test]
fn window__refuses_headers_that_its_core_cannot_follow() {
    let zstd = info(Algorithm::Zstd);
    let good = job(Algorithm::Zstd, JobKind::Compress, 1000);
    for wrong in [
        job(Algorithm::Lz4, JobKind::Compress, 1000),
        Job { level: 2, ..good },
        Job {
            length: zstd.data_bytes() + 1,
            ..good
        },
    ] {
        let mut window = Window::default();
        let refused = window.write(&zstd, 0, &image(wrong, &[])[..4096]);
        assert!(matches!(refused, Err(Refusal::Header)), "{wrong:?}");
        assert_eq!(outcome(&window), None);
        assert!(
            window
                .write(&zstd, 0, &image(good, &[0; 1000]))
                .unwrap()
                .is_some()
        );
    }
    let mut window = Window::default();
    assert!(matches!(window.write(&zstd, 0, &[0; 4096]), Err(Refusal::Header)));
}

#[test]
fn window__mixes_no_data_of_a_wrong_job_into_the_next() {
    let null = info(Algorithm::Null);
    let good = image(job(Algorithm::Null, JobKind::Pass, 8192), &[1; 8192]);
    let wrong = image(job(Algorithm::Lz4, JobKind::Compress, 8192), &[2; 8192]);
    let mut window = Window::default();
    assert!(matches!(
        window.write(&null, 0, &wrong[..4096]),
        Err(Refusal::Header)
    ));
    // The rest of the wrong job, or data in front of the next header: nobody can tell.
    assert!(matches!(
        window.write(&null, 8192, &wrong[8192..]),
        Err(Refusal::Sequence)
    ));
    assert!(window.write(&null, 0, &good[..8192]).unwrap().is_none());
    assert!(window.write(&null, 8192, &good[8192..]).unwrap().is_some());
    // More than the pages of a job, before and behind its header.
    let short = image(job(Algorithm::Null, JobKind::Pass, 100), &[3; 100]);
    for order in [[0, 1], [1, 0]] {
        let mut window = Window::default();
        let parts = [(0, &short[..4096]), (8192, &good[4096..8192])];
        let written = order.map(|part| window.write(&null, parts[part].0, parts[part].1));
        assert!(matches!(written, [Ok(None), Err(Refusal::Header)]), "{order:?}");
        assert!(window.write(&null, 0, &short).unwrap().is_some());
    }
    let mut padded = short.clone();
    padded.resize(8192, 0);
    assert!(Window::default().write(&null, 0, &padded).unwrap().is_some());
}

#[test]
fn window__forgets_a_job_when_it_is_cleared() {
    let null = info(Algorithm::Null);
    let bytes = image(job(Algorithm::Null, JobKind::Pass, 1000), &[7; 1000]);
    let mut window = Window::default();
    let number = window.write(&null, 0, &bytes).unwrap().unwrap();
    let started = window.take(number).unwrap();
    window.clear();
    let next = window.write(&null, 0, &bytes).unwrap().unwrap();
    // The result of the first job is not that of the second, before a core has that one and after.
    window.fail(number);
    assert_eq!(outcome(&window).unwrap().status, JobStatus::Running);
    let next = window.take(next).unwrap();
    window.finish(core(Algorithm::Null).run(started));
    assert_eq!(outcome(&window).unwrap().status, JobStatus::Running);
    window.finish(core(Algorithm::Null).run(next));
    assert_eq!(outcome(&window).unwrap().status, JobStatus::Done);
    window.clear();
    assert!(result(&window, 4096).iter().all(|byte| *byte == 0));
    assert_eq!(outcome(&window), None);
}

#[test]
fn window__begins_anew_with_another_header() {
    let null = info(Algorithm::Null);
    let first = image(job(Algorithm::Null, JobKind::Pass, 1024), &[1; 1024]);
    let second = Job {
        id: 8,
        ..job(Algorithm::Null, JobKind::Pass, 1024)
    };
    let second = image(second, &[2; 1024]);
    let mut window = Window::default();
    assert!(window.write(&null, 0, &first[..4608]).unwrap().is_none());
    assert!(window.write(&null, 0, &second[..4096]).unwrap().is_none());
    // The first block of the first job does not count for the second.
    assert!(window.write(&null, 4608, &second[4608..]).unwrap().is_none());
    let number = window.write(&null, 4096, &second[4096..4608]).unwrap().unwrap();
    let started = window.take(number).unwrap();
    window.finish(core(Algorithm::Null).run(started));
    assert_eq!(result(&window, 1024), [2; 1024]);
}

#[test]
fn window__keeps_the_data_of_a_job_until_a_core_has_it() {
    let null = info(Algorithm::Null);
    let bytes = image(job(Algorithm::Null, JobKind::Pass, 1000), &[7; 1000]);
    let mut window = Window::default();
    // One that is cleared while it waits leaves nothing behind.
    let cleared = window.write(&null, 0, &bytes).unwrap().unwrap();
    window.clear();
    assert!(window.take(cleared).is_none());
    let given_up = window.write(&null, 0, &bytes).unwrap().unwrap();
    assert!(window.take(cleared).is_none());
    window.give_up(cleared);
    assert_eq!(outcome(&window).unwrap().status, JobStatus::Running);
    // After one that no core takes, its last part is sent again.
    window.give_up(given_up);
    assert_eq!(outcome(&window).unwrap().status, JobStatus::Receiving);
    assert!(window.take(given_up).is_none());
    let number = window.write(&null, 4096, &bytes[4096..4608]).unwrap().unwrap();
    let started = window.take(number).unwrap();
    assert_eq!(started.bytes[..1000], [7; 1000]);
    assert!(window.take(number).is_none(), "it is taken once");
}

/// Returns a frame of LZ4 with one compressed block of 32 bytes, and a block size of 4 MiB.
fn short_lz4_frame() -> Vec<u8> {
    let info = FrameInfo::new().block_size(BlockSize::Max4MB);
    let mut encoder = FrameEncoder::with_frame_info(info, Vec::new());
    encoder.write_all(&[7; 32]).unwrap();
    encoder.finish().unwrap()
}

#[test]
fn lz4__takes_short_frames_by_the_thousand() {
    let frame = short_lz4_frame();
    assert!(frame.len() < 32, "{} bytes: the block is compressed", frame.len());
    let mut core = core(Algorithm::Lz4);
    let number = 8000;
    let packed = frame.repeat(number);
    let length = packed.len();
    let (done, unpacked) = run(
        &mut core,
        job(Algorithm::Lz4, JobKind::Decompress, length),
        &packed,
    );
    assert_eq!((done.status, done.length), (JobStatus::Done, 32 * 8000));
    assert!(unpacked.iter().all(|byte| *byte == 7));
}

#[test]
fn lz4__reads_frames_of_each_form() {
    let data = text(&mut ChaCha8Rng::seed_from_u64(4), 200_000);
    let mut core = core(Algorithm::Lz4);
    for mode in [BlockMode::Independent, BlockMode::Linked] {
        for checked in [false, true] {
            let info = FrameInfo::new()
                .block_mode(mode)
                .block_size(BlockSize::Max64KB)
                .block_checksums(checked)
                .content_checksum(checked)
                .content_size(checked.then_some(data.len() as u64));
            let mut encoder = FrameEncoder::with_frame_info(info, Vec::new());
            encoder.write_all(&data).unwrap();
            let packed = encoder.finish().unwrap();
            let decompress = job(Algorithm::Lz4, JobKind::Decompress, packed.len());
            let (done, unpacked) = run(&mut core, decompress, &packed);
            let consumed = done.consumed as usize;
            assert_eq!(
                (done.status, consumed),
                (JobStatus::Done, packed.len()),
                "{mode:?}"
            );
            assert!(unpacked == data, "{mode:?}, {checked}");
            // A header, data and checksums that have changed.
            for at in [4, 6, packed.len() / 2, packed.len() - 1] {
                let mut changed = packed.clone();
                changed[at] ^= 1;
                let (done, unpacked) = run(&mut core, decompress, &changed);
                assert!(
                    done.status != JobStatus::Done || (!checked && at > 6 && unpacked.len() == data.len()),
                    "{mode:?}, {checked}, byte {at}: {done:?}"
                );
            }
        }
    }
}
