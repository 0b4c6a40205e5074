//! Numbers in a region, which other nodes write at any time.

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use zerocopy::IntoBytes;

use crate::memory::Access;
use crate::region::Region;
use crate::session::Error;

/// A number of 64 bits.
pub trait Number: Copy + sealed::Sealed {
    /// Returns its bits.
    fn to_bits(self) -> u64;
    /// Returns the number of these bits.
    fn of_bits(bits: u64) -> Self;
}

mod sealed {
    use zerocopy::{FromBytes, Immutable, IntoBytes};

    pub trait Sealed: FromBytes + IntoBytes + Immutable {}
    impl Sealed for u64 {}
    impl Sealed for i64 {}
    impl Sealed for f64 {}
}

impl Number for u64 {
    fn to_bits(self) -> u64 {
        self
    }
    fn of_bits(bits: u64) -> u64 {
        bits
    }
}

impl Number for i64 {
    fn to_bits(self) -> u64 {
        self.cast_unsigned()
    }
    fn of_bits(bits: u64) -> i64 {
        bits.cast_signed()
    }
}

impl Number for f64 {
    fn to_bits(self) -> u64 {
        f64::to_bits(self)
    }
    fn of_bits(bits: u64) -> f64 {
        f64::from_bits(bits)
    }
}

/// An integer of 64 bits.
pub trait Integer: Number {}

impl Integer for u64 {}

impl Integer for i64 {}

/// An array of numbers in a region. Each access to one of them is that of an atomic of relaxed order: barriers and locks order them between
/// threads. [`fetch_add`](Array::fetch_add) and [`compare_exchange`](Array::compare_exchange) are of sequentially consistent order.
#[derive(Clone, Copy, Debug)]
pub struct Array<'a, T> {
    region: &'a Region<'a>,
    /// Offset of the first number in the region, in bytes.
    offset: u64,
    words: &'a [AtomicU64],
    numbers: PhantomData<T>,
}

impl<'a, T: Number> Array<'a, T> {
    pub(crate) fn new(region: &'a Region<'a>, offset: u64, len: usize) -> Array<'a, T> {
        Array {
            region,
            offset,
            words: region.mapping().double_words(region.place(offset) as usize, len),
            numbers: PhantomData,
        }
    }

    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        self.words.len()
    }

    /// Returns whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.words.is_empty()
    }

    /// Returns an element.
    ///
    /// # Panics
    /// If there is no such element.
    #[inline]
    pub fn get(&self, index: usize) -> T {
        T::of_bits(self.words[index].load(Ordering::Relaxed))
    }

    /// Sets an element.
    ///
    /// # Panics
    /// If there is no such element.
    #[inline]
    pub fn set(&self, index: usize, value: T) {
        self.words[index].store(value.to_bits(), Ordering::Relaxed);
    }

    /// Copies elements from `start` on to a slice. An element that another thread writes meanwhile is old, new or a mixture of both. Loops over
    /// a slice are faster than those over an array, whose elements the compiler does not take together. If the length is constant and small, such as
    /// 16, the compiler turns the copy into loads of the processor's registers.
    ///
    /// # Panics
    /// If there are no such elements.
    #[inline]
    pub fn read(&self, start: usize, out: &mut [T]) {
        let place = self.place(start, out.len());
        let copied = self.region.mapping().read(place, out.as_mut_bytes());
        copied.expect("bytes of the mapping");
    }

    /// Sets elements from `start` on to those of a slice, in any order, some of them perhaps twice. A thread that reads one of them meanwhile gets
    /// the old one, the new one or a mixture of both; what it writes into one may be lost.
    ///
    /// # Panics
    /// If there are no such elements.
    #[inline]
    pub fn write(&self, start: usize, values: &[T]) {
        let place = self.place(start, values.len());
        let copied = self.region.mapping().copy_in(place, values.as_bytes());
        copied.expect("bytes of the mapping");
    }

    /// Returns the place of the first of some elements in the mapping.
    #[inline]
    fn place(&self, start: usize, len: usize) -> u64 {
        let first = self.words[start..start + len].as_ptr();
        first as u64 - self.region.mapping().address()
    }

    /// Gets a right to elements, which other nodes may take again at once: their accesses that follow take no fault until then.
    ///
    /// # Errors
    /// A page was lost with a node.
    ///
    /// # Panics
    /// If there are no such elements.
    pub fn acquire(&self, elements: Range<usize>, access: Access) -> Result<(), Error> {
        self.region.acquire(self.bytes(elements), access)
    }

    /// Asks for a right to elements, as [`Region::prefetch`] does: it does not wait.
    ///
    /// # Panics
    /// If there are no such elements.
    pub fn prefetch(&self, elements: Range<usize>, access: Access) {
        self.region.prefetch(self.bytes(elements), access);
    }

    /// Returns the bytes of elements in the region.
    fn bytes(&self, elements: Range<usize>) -> Range<u64> {
        let len = self.len();
        assert!(
            elements.start <= elements.end && elements.end <= len,
            "elements {elements:?} of {len}"
        );
        let byte = |element: usize| self.offset + 8 * element as u64;
        byte(elements.start)..byte(elements.end)
    }
}

impl<T: Integer> Array<'_, T> {
    /// Adds to an element, wrapping, and returns its value before. In a region with [`Consistency::Sequential`] that is atomic between all threads of all
    /// nodes. With [`Consistency::Release`] it is atomic between the threads of this node alone: what other nodes add at the same time may be lost, so
    /// nodes count by [`Thread::fetch_add`] there.
    ///
    /// # Panics
    /// If there is no such element.
    ///
    /// [`Consistency::Sequential`]: crate::Consistency::Sequential
    /// [`Consistency::Release`]: crate::Consistency::Release
    /// [`Thread::fetch_add`]: crate::Thread::fetch_add
    #[inline]
    pub fn fetch_add(&self, index: usize, value: T) -> T {
        // Integers with a sign wrap as those without.
        T::of_bits(self.words[index].fetch_add(value.to_bits(), Ordering::SeqCst))
    }

    /// Sets an element to `new` if it is `current`, atomically as [`fetch_add`](Array::fetch_add) does, and returns its value before. It needs the right to
    /// write also where nothing is set.
    ///
    /// # Errors
    /// The element has another value, which is returned.
    ///
    /// # Panics
    /// If there is no such element.
    #[inline]
    pub fn compare_exchange(&self, index: usize, current: T, new: T) -> Result<T, T> {
        let word = &self.words[index];
        let outcome = word.compare_exchange(
            current.to_bits(),
            new.to_bits(),
            Ordering::SeqCst,
            Ordering::SeqCst,
        );
        outcome.map(T::of_bits).map_err(T::of_bits)
    }
}
