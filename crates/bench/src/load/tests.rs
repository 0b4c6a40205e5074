use super::*;

#[test]
fn request__and_place_are_read_as_they_are_written() {
    let request = Request {
        receives: 3,
        bytes: 70_000,
        delay: Duration::from_millis(10),
    };
    // Private data is padded with zeros.
    let data = [&request.emit()[..], &[0; 48]].concat();
    let read = Request::parse(&data).unwrap();
    assert_eq!(
        (read.receives, read.bytes, read.delay),
        (3, 70_000, request.delay)
    );
    assert!(Request::parse(&data[..7]).is_none());
    let place = Place {
        va: 1 << 40,
        rkey: RKey(7),
    };
    let read = Place::parse(&place.emit()).unwrap();
    assert_eq!((read.va, read.rkey.0), (1 << 40, 7));
    assert!(Place::parse(&[0; 11]).is_none());
}

#[test]
fn request__of_more_bytes_than_a_sink_has_is_cut() {
    let request = Request {
        receives: 1,
        bytes: u32::MAX,
        delay: Duration::ZERO,
    };
    assert_eq!(Request::parse(&request.emit()).unwrap().bytes, MEMORY_BYTES);
}

#[test]
fn report__is_read_as_it_is_written() {
    let report = Report {
        messages: 10,
        bytes: 40_960,
        seconds: 0.5,
        p50_us: 1.5,
        p99_us: 9.0,
        periods: vec![3, 0, 7],
    };
    let read = Report::parse(&report.emit()).unwrap();
    assert_eq!((read.messages, read.periods.clone()), (10, vec![3, 0, 7]));
    assert_eq!((read.rate(), read.p50_us, read.p99_us), (81_920.0, 1.5, 9.0));
}
