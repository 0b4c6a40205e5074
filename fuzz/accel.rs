//! What a host does with a window of an accelerator, and compressed data, as fuzz targets.
//!
//! Programs share this file, as they do `targets.rs`: `fuzz_targets/accel_window.rs`, `fuzz_targets/accel_frames.rs` and `crates/accel/tests/fuzz.rs`.

use rdmux_accel::{Core, Started, Window, frame_len};
use rdmux_wire::accel::{AcceleratorInfo, Algorithm, DATA_OFFSET, Header, JOB_LEN, Job, JobKind};

const WINDOW: u64 = 1 << 18;

fn info(algorithm: u8) -> AcceleratorInfo {
    let algorithm = Algorithm::ALL[usize::from(algorithm) % Algorithm::ALL.len()];
    AcceleratorInfo {
        algorithm,
        level: rdmux_accel::level_range(algorithm).map_or(0, |(_, level)| level),
        windows: 1,
        window_bytes: WINDOW,
    }
}

/// A byte that chooses the core, then what a host does: an operation, an offset in blocks u16, a length u16, and so many bytes. Jobs run at once. What a host
/// reads is a header, a result no longer than the window, and zeros.
///
/// Operations: 0 writes the bytes, 1 submits them with the job of the header with which they begin, 2 reads, 3 clears.
pub(crate) fn accel_window(input: &[u8]) {
    let [algorithm, bytes @ ..] = input else {
        return;
    };
    let info = info(*algorithm);
    let mut core = Core::new(info.algorithm, info.level);
    let mut window = Window::default();
    let mut rest = bytes;
    while let [operation, a, b, c, d, more @ ..] = rest {
        let length = usize::from(u16::from_le_bytes([*c, *d])).min(more.len());
        let offset = u64::from(u16::from_le_bytes([*a, *b])) * 512 % WINDOW;
        let (part, more) = more.split_at(length);
        rest = more;
        let taken = match operation % 4 {
            0 => {
                let mut blocks = part.to_vec();
                blocks.resize(length.next_multiple_of(512), 0);
                blocks.truncate((WINDOW - offset) as usize);
                window.write(&info, offset, &blocks)
            }
            1 => {
                let Ok(header) = Header::parse(part) else {
                    continue;
                };
                window.submit(&info, header.job, offset, &part[JOB_LEN..])
            }
            2 => {
                check(&window, &info);
                continue;
            }
            _ => {
                window.clear();
                continue;
            }
        };
        if let Ok(Some(number)) = taken {
            let started = window.take(number).expect("the window was not cleared");
            window.finish(core.run(started));
            assert!(window.outcome().is_some_and(|outcome| outcome.status.is_over()));
            check(&window, &info);
        }
    }
}

fn check(window: &Window, info: &AcceleratorInfo) {
    let mut bytes = vec![1; WINDOW as usize];
    window.read(0, &mut bytes);
    let length = window.outcome().map_or(0, |outcome| outcome.length);
    assert!(length <= info.data_bytes());
    let behind = DATA_OFFSET as usize + length as usize;
    assert!(bytes[behind..].iter().all(|byte| *byte == 0));
    assert!(bytes[JOB_LEN..DATA_OFFSET as usize].iter().all(|byte| *byte == 0));
    assert!(bytes[..8] == [0; 8] || Header::parse(&bytes).is_ok());
}

/// A byte that chooses the algorithm, then compressed data: what comes out of them fits the window, and the frames that a host would cut are the
/// ones that the core takes.
pub(crate) fn accel_frames(input: &[u8]) {
    let [algorithm, data @ ..] = input else {
        return;
    };
    let info = info(*algorithm);
    if !info.algorithm.takes(JobKind::Decompress) || data.len() > info.data_bytes() as usize {
        return;
    }
    let job = Job {
        kind: JobKind::Decompress,
        algorithm: info.algorithm,
        level: 0,
        id: 0,
        length: data.len() as u32,
        align: 0,
    };
    let mut buffer = data.to_vec();
    buffer.resize(info.data_bytes() as usize, 0);
    let ran = Core::new(info.algorithm, info.level).run(Started::of(job, buffer));
    assert!(ran.outcome.status.is_over());
    assert!(ran.outcome.length <= info.data_bytes() && ran.outcome.consumed <= job.length);
    let mut at = 0;
    while at < ran.outcome.consumed as usize {
        match frame_len(info.algorithm, &data[at..]) {
            Ok(Some(length)) => at += length,
            Ok(None) => at = data.len(),
            Err(status) => panic!("the core takes what is no frame at {at}: {status:?}"),
        }
    }
    assert_eq!(at, ran.outcome.consumed as usize);
}
