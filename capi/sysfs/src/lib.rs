//! Shows a program the RDMA devices of rdmux where it looks for those of the kernel: a library to be preloaded (`LD_PRELOAD`),
//! whose file functions do what the C library's do, but find `/sys/class/infiniband`, `/sys/class/infiniband_verbs` and
//! `/dev/infiniband` below the folder that `RDMUX_SYSFS` names. `rdmux run` makes that folder and sets both.
//!
//! A path elsewhere is passed on unchanged: the library allocates and looks up nothing once the program has started, so that
//! functions that may be called in a signal handler still may. Threads may be cancelled in these functions as in the C
//! library's.
#![allow(unsafe_code, reason = "the C interface")]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, Ordering};

/// Paths that are redirected, with everything below them.
const SHOWN: [&[u8]; 3] = [
    b"/sys/class/infiniband",
    b"/sys/class/infiniband_verbs",
    b"/dev/infiniband",
];

const VARIABLE: &CStr = c"RDMUX_SYSFS";
const PATH_MAX: usize = libc::PATH_MAX as usize;

/// The folder, copied when the program starts, since programs overwrite their environment.
static FOLDER: OnceLock<Vec<u8>> = OnceLock::new();

extern "C" fn start() {
    for function in ALL {
        function.next();
    }
    // SAFETY: the program's other threads are not there yet.
    let value = unsafe { libc::getenv(VARIABLE.as_ptr()) };
    if !value.is_null() {
        // SAFETY: what getenv gives is a string of C.
        let _ = FOLDER.set(unsafe { CStr::from_ptr(value) }.to_bytes().to_vec());
    }
}

#[used]
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn() = start;

/// Returns whether a path is one of [`SHOWN`], or below.
fn is_shown(path: &[u8]) -> bool {
    SHOWN.iter().any(|shown| {
        path.strip_prefix(*shown)
            .is_some_and(|rest| matches!(rest.first(), None | Some(b'/')))
    })
}

/// Calls a function with the redirected path, or with the path itself.
///
/// # Safety
/// The path is null or a string of C.
unsafe fn redirected<R>(path: *const c_char, call: impl FnOnce(*const c_char) -> R) -> R {
    // SAFETY: not null, so a string of C; the shortest of those that are shown is longer than what is looked at first.
    let is_candidate = !path.is_null() && unsafe { *path.cast::<u8>() } == b'/';
    let Some(folder) = FOLDER.get().filter(|_| is_candidate) else {
        return call(path);
    };
    // SAFETY: a string of C, says the caller.
    let text = unsafe { CStr::from_ptr(path) }.to_bytes();
    if !is_shown(text) || folder.len() + text.len() >= PATH_MAX {
        return call(path);
    }
    let mut whole = [0u8; PATH_MAX];
    whole[..folder.len()].copy_from_slice(folder);
    whole[folder.len()..folder.len() + text.len()].copy_from_slice(text);
    call(whole.as_ptr().cast())
}

/// Value that a function returns when there is no function of its name behind this library.
trait Missing {
    const MISSING: Self;
}

impl Missing for c_int {
    const MISSING: c_int = -1;
}

impl Missing for isize {
    const MISSING: isize = -1;
}

impl<T> Missing for *mut T {
    const MISSING: *mut T = std::ptr::null_mut();
}

/// The function of a name behind this library.
struct Next {
    name: &'static CStr,
    known: AtomicPtr<c_void>,
}

impl Next {
    const fn new(name: &'static str) -> Next {
        match CStr::from_bytes_with_nul(name.as_bytes()) {
            Ok(name) => Next {
                name,
                known: AtomicPtr::new(std::ptr::null_mut()),
            },
            Err(_) => panic!("a name has one zero, at its end"),
        }
    }

    /// Returns null if there is none. It is looked up when the program starts, or earlier, if another library's start calls it.
    fn next(&self) -> *mut c_void {
        let found = self.known.load(Ordering::Relaxed);
        if !found.is_null() {
            return found;
        }
        // SAFETY: a name of C.
        let found = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) };
        self.known.store(found, Ordering::Relaxed);
        found
    }
}

/// Functions of the C library, by their parameters before the path and after it.
macro_rules! functions {
    ($($name:ident($($before:ident: $before_type:ty),*; $($after:ident: $after_type:ty),*) -> $result:ty;)*) => {
        #[allow(non_upper_case_globals, reason = "the C library's names")]
        mod next {
            $(pub(super) static $name: super::Next = super::Next::new(concat!(stringify!($name), "\0"));)*
        }

        static ALL: &[&Next] = &[$(&next::$name),*];

        $(
            // A cancelled thread unwinds through this.
            #[unsafe(no_mangle)]
            unsafe extern "C-unwind" fn $name(
                $($before: $before_type,)*
                path: *const c_char,
                $($after: $after_type),*
            ) -> $result {
                type Function = unsafe extern "C-unwind" fn($($before_type,)* *const c_char, $($after_type),*) -> $result;
                let function = next::$name.next();
                if function.is_null() {
                    // SAFETY: the location is this thread's own.
                    unsafe { *libc::__errno_location() = libc::ENOSYS };
                    return <$result>::MISSING;
                }
                // SAFETY: the C library's function of this name has these parameters, and its caller gave what it asks for.
                unsafe {
                    let function: Function = std::mem::transmute(function);
                    redirected(path, |path| function($($before,)* path, $($after),*))
                }
            }
        )*
    };
}

// A mode that was not given is passed on as whatever is in its place, and not looked at.
functions! {
    open(; flags: c_int, mode: c_uint) -> c_int;
    open64(; flags: c_int, mode: c_uint) -> c_int;
    __open_2(; flags: c_int) -> c_int;
    __open64_2(; flags: c_int) -> c_int;
    openat(at: c_int; flags: c_int, mode: c_uint) -> c_int;
    openat64(at: c_int; flags: c_int, mode: c_uint) -> c_int;
    __openat_2(at: c_int; flags: c_int) -> c_int;
    __openat64_2(at: c_int; flags: c_int) -> c_int;
    fopen(; mode: *const c_char) -> *mut c_void;
    fopen64(; mode: *const c_char) -> *mut c_void;
    stat(; to: *mut c_void) -> c_int;
    stat64(; to: *mut c_void) -> c_int;
    lstat(; to: *mut c_void) -> c_int;
    lstat64(; to: *mut c_void) -> c_int;
    fstatat(at: c_int; to: *mut c_void, flags: c_int) -> c_int;
    fstatat64(at: c_int; to: *mut c_void, flags: c_int) -> c_int;
    statx(at: c_int; flags: c_int, mask: c_uint, to: *mut c_void) -> c_int;
    __xstat(version: c_int; to: *mut c_void) -> c_int;
    __xstat64(version: c_int; to: *mut c_void) -> c_int;
    __lxstat(version: c_int; to: *mut c_void) -> c_int;
    __lxstat64(version: c_int; to: *mut c_void) -> c_int;
    __fxstatat(version: c_int, at: c_int; to: *mut c_void, flags: c_int) -> c_int;
    __fxstatat64(version: c_int, at: c_int; to: *mut c_void, flags: c_int) -> c_int;
    access(; mode: c_int) -> c_int;
    eaccess(; mode: c_int) -> c_int;
    euidaccess(; mode: c_int) -> c_int;
    faccessat(at: c_int; mode: c_int, flags: c_int) -> c_int;
    readlink(; to: *mut c_char, room: usize) -> isize;
    readlinkat(at: c_int; to: *mut c_char, room: usize) -> isize;
    __readlink_chk(; to: *mut c_char, room: usize, size: usize) -> isize;
    __readlinkat_chk(at: c_int; to: *mut c_char, room: usize, size: usize) -> isize;
    realpath(; to: *mut c_char) -> *mut c_char;
    __realpath_chk(; to: *mut c_char, size: usize) -> *mut c_char;
    canonicalize_file_name(;) -> *mut c_char;
    getxattr(; name: *const c_char, to: *mut c_void, room: usize) -> isize;
    lgetxattr(; name: *const c_char, to: *mut c_void, room: usize) -> isize;
    listxattr(; to: *mut c_char, room: usize) -> isize;
    llistxattr(; to: *mut c_char, room: usize) -> isize;
    opendir(;) -> *mut c_void;
    scandir(; list: *mut c_void, filter: *const c_void, compare: *const c_void) -> c_int;
    scandir64(; list: *mut c_void, filter: *const c_void, compare: *const c_void) -> c_int;
    chdir(;) -> c_int;
}
