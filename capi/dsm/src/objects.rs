//! The objects of the program. The pointer by which it names one is a number that no other object had before, and is never followed: a
//! pointer that is null, of another kind, made up, or of an object that has ended is found in no table.

use std::collections::BTreeMap;
use std::ops::Range;
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use rdmux_dsm::Session;

use crate::failure::Failure;
use crate::heap::Heap;
use crate::region::Region;
use crate::thread::Thread;

/// Process that has joined first, or 0. A child after fork(2) has the tables, but no thread that drives, and no pages.
static PROCESS: AtomicU32 = AtomicU32::new(0);

static OBJECTS: RwLock<Objects> = RwLock::new(Objects {
    made: 0,
    sessions: BTreeMap::new(),
    regions: BTreeMap::new(),
    heaps: BTreeMap::new(),
    threads: BTreeMap::new(),
});

/// Objects by their numbers. Others hold a count of an object only during a call that uses it.
type Table<T> = BTreeMap<usize, Arc<T>>;

pub(crate) struct Objects {
    /// Objects that were made.
    made: usize,
    sessions: Table<Session>,
    regions: Table<Region>,
    heaps: Table<Heap>,
    threads: Table<Thread>,
}

/// A kind of objects.
pub(crate) trait Object: Sized {
    /// The name of what a pointer is not.
    const NAME: &str;

    fn table(objects: &Objects) -> &Table<Self>;
    fn table_mut(objects: &mut Objects) -> &mut Table<Self>;
}

impl Object for Session {
    const NAME: &str = "session";

    fn table(objects: &Objects) -> &Table<Session> {
        &objects.sessions
    }
    fn table_mut(objects: &mut Objects) -> &mut Table<Session> {
        &mut objects.sessions
    }
}

impl Object for Region {
    const NAME: &str = "region";

    fn table(objects: &Objects) -> &Table<Region> {
        &objects.regions
    }
    fn table_mut(objects: &mut Objects) -> &mut Table<Region> {
        &mut objects.regions
    }
}

impl Object for Heap {
    const NAME: &str = "heap";

    fn table(objects: &Objects) -> &Table<Heap> {
        &objects.heaps
    }
    fn table_mut(objects: &mut Objects) -> &mut Table<Heap> {
        &mut objects.heaps
    }
}

impl Object for Thread {
    const NAME: &str = "thread";

    fn table(objects: &Objects) -> &Table<Thread> {
        &objects.threads
    }
    fn table_mut(objects: &mut Objects) -> &mut Table<Thread> {
        &mut objects.threads
    }
}

/// Checks that this process is the one that has joined, or that none has.
///
/// # Errors
/// It is a child of that one, in which a lock may be held by a thread that is not there.
pub(crate) fn check_process() -> Result<(), Failure> {
    let process = PROCESS.load(Ordering::Relaxed);
    match process == 0 || process == std::process::id() {
        true => Ok(()),
        false => Err(Failure::invalid(
            "a child of a node after fork(2) has no shared memory: let it execute a program",
        )),
    }
}

/// Claims the objects for this process.
///
/// # Errors
/// As [`check_process`].
pub(crate) fn claim_process() -> Result<(), Failure> {
    let own = std::process::id();
    // Of two threads either stores the same number.
    let _ = PROCESS.compare_exchange(0, own, Ordering::Relaxed, Ordering::Relaxed);
    check_process()
}

fn read() -> Result<RwLockReadGuard<'static, Objects>, Failure> {
    check_process()?;
    Ok(OBJECTS.read().unwrap_or_else(PoisonError::into_inner))
}

fn write() -> Result<RwLockWriteGuard<'static, Objects>, Failure> {
    check_process()?;
    Ok(OBJECTS.write().unwrap_or_else(PoisonError::into_inner))
}

fn foreign<T: Object>(pointer: *mut T) -> Failure {
    Failure::invalid(match pointer.is_null() {
        true => format!("a null pointer is no {}", T::NAME),
        false => format!("{pointer:p} is no {}, or it has ended", T::NAME),
    })
}

/// Returns the object that the program names.
///
/// # Errors
/// There is none.
pub(crate) fn find<T: Object>(pointer: *mut T) -> Result<Arc<T>, Failure> {
    let found = T::table(&*read()?).get(&pointer.addr()).cloned();
    found.ok_or_else(|| foreign(pointer))
}

/// Adds an object, and returns the pointer by which the program names it.
///
/// # Errors
/// As [`check_process`].
pub(crate) fn add<T: Object>(object: Arc<T>) -> Result<*mut T, Failure> {
    let mut objects = write()?;
    objects.made += 1;
    // Odd: no object of the program's is there.
    let number = 2 * objects.made + 1;
    T::table_mut(&mut objects).insert(number, object);
    Ok(ptr::without_provenance_mut(number))
}

/// Takes an object away that no call uses.
///
/// # Errors
/// There is none, or a call uses it.
pub(crate) fn remove<T: Object>(pointer: *mut T) -> Result<Arc<T>, Failure> {
    let mut objects = write()?;
    let table = T::table_mut(&mut objects);
    let object = table.get(&pointer.addr()).ok_or_else(|| foreign(pointer))?;
    // Counts are taken under the lock alone.
    if Arc::strong_count(object) > 1 {
        return Err(busy(T::NAME));
    }
    table.remove(&pointer.addr()).ok_or_else(|| foreign(pointer))
}

fn busy(name: &str) -> Failure {
    let text = format!("another thread of the program is in a call that uses the {name}");
    Failure::new(libc::EBUSY, text)
}

/// A session that was taken away, with all that belongs to it. The fields are dropped in their order: threads give their locks back.
pub(crate) struct Removed {
    _threads: Vec<Arc<Thread>>,
    _regions: Vec<Arc<Region>>,
    _heaps: Vec<Arc<Heap>>,
    _session: Arc<Session>,
}

/// Takes a session away, its threads, its regions and its heaps.
///
/// # Errors
/// There is none, or a call uses one of them.
pub(crate) fn remove_session(pointer: *mut Session) -> Result<Removed, Failure> {
    let mut objects = write()?;
    let found = objects.sessions.get(&pointer.addr()).cloned();
    let session = found.ok_or_else(|| foreign(pointer))?;
    let threads = of_session(&objects.threads, |thread| thread.session(), &session)?;
    let regions = of_session(&objects.regions, |region| region.session(), &session)?;
    let heaps = of_session(&objects.heaps, |heap| heap.session(), &session)?;
    // The table's, this function's, and one of each.
    if Arc::strong_count(&session) > 2 + threads.len() + regions.len() + heaps.len() {
        return Err(busy(Session::NAME));
    }
    objects.sessions.remove(&pointer.addr());
    Ok(Removed {
        _threads: taken(&mut objects.threads, &threads),
        _regions: taken(&mut objects.regions, &regions),
        _heaps: taken(&mut objects.heaps, &heaps),
        _session: session,
    })
}

/// Returns the numbers of the objects of a session.
///
/// # Errors
/// A call uses one of them.
fn of_session<T: Object>(
    table: &Table<T>,
    session_of: impl Fn(&T) -> &Arc<Session>,
    session: &Arc<Session>,
) -> Result<Vec<usize>, Failure> {
    let mut numbers = Vec::new();
    for (number, object) in table {
        if Arc::ptr_eq(session_of(object), session) {
            if Arc::strong_count(object) > 1 {
                return Err(busy(T::NAME));
            }
            numbers.push(*number);
        }
    }
    Ok(numbers)
}

fn taken<T>(table: &mut Table<T>, numbers: &[usize]) -> Vec<Arc<T>> {
    numbers.iter().filter_map(|number| table.remove(number)).collect()
}

/// Checks that some bytes of the program are in no region: a call that copies them would fault while nobody could answer.
///
/// # Errors
/// Some are in a region.
pub(crate) fn check_outside(address: usize, bytes: usize) -> Result<(), Failure> {
    let (start, end) = (address as u64, (address as u64).saturating_add(bytes as u64));
    let overlaps = |addresses: Range<u64>| start < addresses.end && addresses.start < end;
    let objects = read()?;
    let mut regions = objects.regions.values().map(|region| region.addresses());
    let mut heaps = objects.heaps.values().flat_map(|heap| heap.addresses());
    match regions.any(overlaps) || heaps.any(overlaps) {
        true => Err(Failure::invalid("the program's side of a copy is in a region")),
        false => Ok(()),
    }
}

/// Gives the program an object by a pointer to its pointer.
///
/// # Errors
/// The pointer is null, or the object cannot be made.
///
/// # Safety
/// The pointer is null, or the program may write through it.
pub(crate) unsafe fn give<T: Object>(
    to: *mut *mut T,
    make: impl FnOnce() -> Result<T, Failure>,
) -> Result<(), Failure> {
    check_process()?;
    if to.is_null() {
        return Err(Failure::invalid(format!("no place for the {}", T::NAME)));
    }
    let pointer = add(Arc::new(make()?))?;
    // SAFETY: not null, so the program may write there, says the caller.
    unsafe { to.write(pointer) };
    Ok(())
}
