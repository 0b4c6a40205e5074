//! Heaps.

use std::alloc::Layout;
use std::ffi::{c_int, c_uint, c_void};
use std::ops::Range;
use std::ptr;
use std::sync::Arc;

use rdmux_dsm::{HeapOptions, Place, Session};

use crate::failure::{Failure, status};
use crate::objects::{find, give};
use crate::region::{consistency_of, mode_of};
use crate::session::outlived;

/// Alignment of objects of so many bytes at least: that of malloc(3).
const ALIGNMENT: usize = 16;

/// A heap, with a count of its session.
pub(crate) struct Heap {
    /// Dropped before the session.
    inner: rdmux_dsm::Heap<'static>,
    session: Arc<Session>,
}

impl Heap {
    fn make(session: Arc<Session>, options: &HeapOptions) -> Result<Heap, Failure> {
        // SAFETY: the heap is in this structure, whose count of the session is dropped after it.
        let inner = unsafe { outlived(&session) }.heap(options)?;
        Ok(Heap { inner, session })
    }

    pub(crate) fn session(&self) -> &Arc<Session> {
        &self.session
    }

    /// Returns the addresses of its regions.
    pub(crate) fn addresses(&self) -> impl Iterator<Item = Range<u64>> {
        self.inner.regions().iter().map(|region| {
            let start = region.address();
            start..start + region.mapping().len() as u64
        })
    }
}

/// `struct rdmux_dsm_heap_options`
#[repr(C)]
struct Options {
    faults: u32,
    consistency: u32,
    reserved: [u32; 6],
}

impl Options {
    fn heap_options(&self, bytes: u64) -> Result<HeapOptions, Failure> {
        if self.reserved != [0; 6] {
            let text = "a reserved field of the heap's options is not 0";
            return Err(Failure::invalid(text));
        }
        Ok(HeapOptions {
            bytes,
            mode: mode_of(self.faults)?,
            consistency: consistency_of(self.consistency)?,
        })
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rdmux_dsm_heap_make(
    session: *mut Session,
    bytes: u64,
    faults: c_uint,
    heap: *mut *mut Heap,
) -> c_int {
    let make = || {
        let session = find(session)?;
        let options = Options {
            faults,
            consistency: 0,
            reserved: [0; 6],
        };
        Heap::make(session, &options.heap_options(bytes)?)
    };
    // SAFETY: the program gives a null pointer, or one for a pointer.
    status(|| unsafe { give(heap, make) }.map(|()| 0))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rdmux_dsm_heap_make_with(
    session: *mut Session,
    bytes: u64,
    options: *const Options,
    heap: *mut *mut Heap,
) -> c_int {
    let make = || {
        let session = find(session)?;
        // SAFETY: the program gives a null pointer, or one to options.
        let options = match unsafe { options.as_ref() } {
            Some(options) => options.heap_options(bytes)?,
            None => HeapOptions::new(bytes)?,
        };
        Heap::make(session, &options)
    };
    // SAFETY: the program gives a null pointer, or one for a pointer.
    status(|| unsafe { give(heap, make) }.map(|()| 0))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rdmux_dsm_alloc(
    heap: *mut Heap,
    bytes: usize,
    node: c_int,
    object: *mut *mut c_void,
) -> c_int {
    status(|| {
        let heap = find(heap)?;
        if object.is_null() {
            return Err(Failure::invalid("no place for the address of the object"));
        }
        let place = match node {
            -1 => Place::Here,
            -2 => Place::InTurn,
            node => Place::Node(node.cast_unsigned()),
        };
        let layout = Layout::from_size_align(bytes, ALIGNMENT);
        let layout = layout.map_err(|_| Failure::invalid(format!("no process has {bytes} bytes")))?;
        let address = heap.inner.allocate(layout, place)?;
        // SAFETY: not null, so the program has room for a pointer.
        unsafe { object.write(ptr::with_exposed_provenance_mut(address as usize)) };
        Ok(0)
    })
}

#[unsafe(no_mangle)]
extern "C" fn rdmux_dsm_free(heap: *mut Heap, object: *mut c_void) -> c_int {
    status(|| {
        let heap = find(heap)?;
        if !object.is_null() {
            heap.inner.free(object.addr() as u64)?;
        }
        Ok(0)
    })
}
