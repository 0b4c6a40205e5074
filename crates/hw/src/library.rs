//! The system's `libibverbs.so.1` and `librdmacm.so.1`, opened when the first RNIC is: the program itself starts without them.
//! [`Library`] has their functions by name.
#![allow(unsafe_code, reason = "functions of C libraries that are found at run time")]

use std::ffi::{CStr, CString, OsString, c_char, c_int, c_void};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use rdmux_verbs::abi;

const LIBIBVERBS: &str = "libibverbs.so.1";
const LIBRDMACM: &str = "librdmacm.so.1";
/// Symbol that tells rdmux's own replacements of the two libraries from the system's.
const DROP_IN: &CStr = c"rdmux_drop_in";
/// For tests: variable with the folder from which the two libraries are taken, rdmux's own as well, so that this provider runs
/// where there is no RNIC.
const FOLDER_VARIABLE: &str = "RDMUX_HW_LIBRARIES";

/// Why the system's libraries cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LibraryError {
    /// They are not installed, or cannot be loaded.
    #[error(
        "provider hw needs the system's {name}: {why}; install rdma-core's libraries (Debian: libibverbs1 librdmacm1 ibverbs-providers)"
    )]
    Missing {
        /// The file.
        name: &'static str,
        /// Message of the loader.
        why: String,
    },
    /// They are older than required.
    #[error("provider hw needs a newer {name}: this one lacks {symbol}, which rdma-core 34 has")]
    TooOld {
        /// The file.
        name: &'static str,
        /// Symbol that it lacks.
        symbol: &'static str,
    },
    /// They are rdmux's own, so that rdmux would call itself.
    #[error(
        "provider hw found rdmux's own {name}, not the system's: start the program without 'rdmux run', or without its folder in LD_LIBRARY_PATH"
    )]
    DropIn {
        /// The file.
        name: &'static str,
    },
}

/// One opened library. It stays open: its threads and exit handlers may run as long as the process does.
struct Opened {
    name: &'static str,
    handle: *mut c_void,
}

impl Opened {
    fn open(name: &'static str, folder: Option<&Path>) -> Result<Opened, LibraryError> {
        let path = folder.map_or_else(
            || OsString::from(name),
            |folder| folder.join(name).into_os_string(),
        );
        let Ok(file) = CString::new(path.into_vec()) else {
            unreachable!("neither a name nor an environment variable has a zero byte")
        };
        // SAFETY: the name is a C string. Loading runs the library's constructors, which are the system's.
        let handle = unsafe { libc::dlopen(file.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            return Err(LibraryError::Missing {
                name,
                why: dl_error(),
            });
        }
        let opened = Opened { name, handle };
        if folder.is_none() && opened.find(DROP_IN).is_some() {
            return Err(LibraryError::DropIn { name });
        }
        Ok(opened)
    }

    fn find(&self, symbol: &CStr) -> Option<*mut c_void> {
        // SAFETY: the handle is an open library's, and the name is a C string.
        let address = unsafe { libc::dlsym(self.handle, symbol.as_ptr()) };
        (!address.is_null()).then_some(address)
    }
}

/// Returns the loader's message about the last failure, on one line.
fn dl_error() -> String {
    // SAFETY: the string is this thread's until its next call of the loader.
    let text = unsafe { libc::dlerror() };
    if text.is_null() {
        return "it cannot be opened".into();
    }
    // SAFETY: not null, so it is a C string of this thread's.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_string_lossy().replace('\n', " ")
}

/// Declares the functions of the two libraries once: their names there, and their types.
macro_rules! functions {
    ($($library:ident = $file:ident { $($name:ident: fn($($argument:ty),*) $(-> $result:ty)?;)* })*) => {
        /// The functions of the two libraries.
        #[derive(Debug)]
        pub(super) struct Library {
            $($(pub(super) $name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*)*
        }

        impl Library {
            fn open() -> Result<Library, LibraryError> {
                let folder = std::env::var_os(FOLDER_VARIABLE).filter(|folder| !folder.is_empty());
                let folder = folder.map(PathBuf::from);
                $(let $library = Opened::open($file, folder.as_deref())?;)*
                Ok(Library {
                    $($($name: {
                        let Ok(symbol) = CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) else {
                            unreachable!("one zero byte, at the end")
                        };
                        let found = $library.find(symbol);
                        let address = found.ok_or(LibraryError::TooOld {
                            name: $library.name,
                            symbol: stringify!($name),
                        })?;
                        // SAFETY: the library exports a function of this name, whose type its public header gives; it is the one
                        // declared here.
                        unsafe {
                            std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($argument),*) $(-> $result)?>(address)
                        }
                    },)*)*
                })
            }
        }
    };
}

functions! {
    ibverbs = LIBIBVERBS {
        ibv_get_device_list: fn(*mut c_int) -> *mut *mut abi::Device;
        ibv_free_device_list: fn(*mut *mut abi::Device);
        ibv_open_device: fn(*mut abi::Device) -> *mut abi::Context;
        ibv_close_device: fn(*mut abi::Context) -> c_int;
        ibv_query_device: fn(*mut abi::Context, *mut abi::DeviceAttr) -> c_int;
        ibv_query_port: fn(*mut abi::Context, u8, *mut abi::PortAttr) -> c_int;
        _ibv_query_gid_ex: fn(*mut abi::Context, u32, u32, *mut abi::GidEntry, u32, usize) -> c_int;
        ibv_get_async_event: fn(*mut abi::Context, *mut abi::AsyncEvent) -> c_int;
        ibv_ack_async_event: fn(*mut abi::AsyncEvent);
        ibv_alloc_pd: fn(*mut abi::Context) -> *mut abi::Pd;
        ibv_dealloc_pd: fn(*mut abi::Pd) -> c_int;
        ibv_reg_mr_iova2: fn(*mut abi::Pd, *mut c_void, usize, u64, u32) -> *mut abi::Mr;
        ibv_reg_dmabuf_mr: fn(*mut abi::Pd, u64, usize, u64, c_int, c_int) -> *mut abi::Mr;
        ibv_dereg_mr: fn(*mut abi::Mr) -> c_int;
        ibv_create_comp_channel: fn(*mut abi::Context) -> *mut abi::CompChannel;
        ibv_destroy_comp_channel: fn(*mut abi::CompChannel) -> c_int;
        ibv_create_cq: fn(*mut abi::Context, c_int, *mut c_void, *mut abi::CompChannel, c_int) -> *mut abi::Cq;
        ibv_resize_cq: fn(*mut abi::Cq, c_int) -> c_int;
        ibv_destroy_cq: fn(*mut abi::Cq) -> c_int;
        ibv_get_cq_event: fn(*mut abi::CompChannel, *mut *mut abi::Cq, *mut *mut c_void) -> c_int;
        ibv_ack_cq_events: fn(*mut abi::Cq, u32);
        ibv_create_srq: fn(*mut abi::Pd, *mut abi::SrqInitAttr) -> *mut abi::Srq;
        ibv_modify_srq: fn(*mut abi::Srq, *mut abi::SrqAttr, c_int) -> c_int;
        ibv_query_srq: fn(*mut abi::Srq, *mut abi::SrqAttr) -> c_int;
        ibv_destroy_srq: fn(*mut abi::Srq) -> c_int;
        ibv_create_qp: fn(*mut abi::Pd, *mut abi::QpInitAttr) -> *mut abi::Qp;
        ibv_qp_to_qp_ex: fn(*mut abi::Qp) -> *mut abi::QpEx;
        ibv_modify_qp: fn(*mut abi::Qp, *mut abi::QpAttr, c_int) -> c_int;
        ibv_query_qp: fn(*mut abi::Qp, *mut abi::QpAttr, c_int, *mut abi::QpInitAttr) -> c_int;
        ibv_destroy_qp: fn(*mut abi::Qp) -> c_int;
        ibv_create_ah: fn(*mut abi::Pd, *mut abi::AhAttr) -> *mut abi::Ah;
        ibv_destroy_ah: fn(*mut abi::Ah) -> c_int;
        ibv_attach_mcast: fn(*mut abi::Qp, *const abi::AlignedGid, u16) -> c_int;
        ibv_detach_mcast: fn(*mut abi::Qp, *const abi::AlignedGid, u16) -> c_int;
    }
    rdmacm = LIBRDMACM {
        rdma_create_event_channel: fn() -> *mut abi::EventChannel;
        rdma_destroy_event_channel: fn(*mut abi::EventChannel);
        rdma_create_id: fn(*mut abi::EventChannel, *mut *mut abi::CmId, *mut c_void, u32) -> c_int;
        rdma_destroy_id: fn(*mut abi::CmId) -> c_int;
        rdma_bind_addr: fn(*mut abi::CmId, *mut abi::SockAddr) -> c_int;
        rdma_resolve_addr: fn(*mut abi::CmId, *mut abi::SockAddr, *mut abi::SockAddr, c_int) -> c_int;
        rdma_resolve_route: fn(*mut abi::CmId, c_int) -> c_int;
        rdma_set_option: fn(*mut abi::CmId, c_int, c_int, *mut c_void, usize) -> c_int;
        rdma_init_qp_attr: fn(*mut abi::CmId, *mut abi::QpAttr, *mut c_int) -> c_int;
        rdma_connect: fn(*mut abi::CmId, *mut abi::ConnParam) -> c_int;
        rdma_establish: fn(*mut abi::CmId) -> c_int;
        rdma_listen: fn(*mut abi::CmId, c_int) -> c_int;
        rdma_accept: fn(*mut abi::CmId, *mut abi::ConnParam) -> c_int;
        rdma_reject: fn(*mut abi::CmId, *const c_void, u8) -> c_int;
        rdma_disconnect: fn(*mut abi::CmId) -> c_int;
        rdma_get_cm_event: fn(*mut abi::EventChannel, *mut *mut abi::CmEvent) -> c_int;
        rdma_ack_cm_event: fn(*mut abi::CmEvent) -> c_int;
    }
}

impl Library {
    /// Returns the system's libraries, opened once.
    pub(super) fn get() -> Result<&'static Library, LibraryError> {
        static LIBRARY: OnceLock<Result<Library, LibraryError>> = OnceLock::new();
        let opened = LIBRARY.get_or_init(Library::open);
        opened.as_ref().map_err(Clone::clone)
    }
}

/// Returns the text of a fixed field.
pub(super) fn text(field: &[c_char]) -> String {
    let bytes: Vec<u8> = field
        .iter()
        .map(|c| c.to_ne_bytes()[0])
        .take_while(|b| *b != 0)
        .collect();
    String::from_utf8_lossy(&bytes).into_owned()
}
