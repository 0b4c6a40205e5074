//! Programs of the server's own host that open a region's file. The kernel announces them to the server and makes them wait;
//! the server lets them continue when no lease conflicts. As long as they have the file open, nobody gets a mapping that
//! conflicts.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use rdmux_memory::{DaxMemory, FileMemory, FileWatch, Wanted};
use rdmux_runtime::Mailbox;
use rdmux_wire::push::{Access, Conflict, ErrorCode};

use super::control::Local;
use super::id::RegionId;
use super::requests::Pending;
use super::service::{Driver, Service};
use super::session::Map;
use super::work::Failure;
use super::{Mail, ServerEvent};
use crate::region::{Place, Region};

/// Watches the files of regions. Returns the watches by number of the region, and adds an event for each file that has none.
pub(super) fn watch(
    regions: &[Arc<Region>],
    server: &Mailbox<Mail>,
    events: &mut Vec<ServerEvent>,
) -> HashMap<RegionId, FileWatch> {
    let mut files = HashMap::new();
    for (at, region) in regions.iter().enumerate() {
        let number = RegionId(at);
        let server = server.clone();
        let tell = move |wanted| {
            server.send(Mail::Local(Local::Wanted(number, wanted)));
        };
        let memory = region.memory().as_any();
        if let Some(mapped) = memory.and_then(|memory| memory.downcast_ref::<DaxMemory>()) {
            files.extend(mapped.watch(tell).map(|watch| (number, watch)));
            continue;
        }
        let Some(file) = memory.and_then(|memory| memory.downcast_ref::<FileMemory>()) else {
            if matches!(region.place(), Place::File(..)) {
                let why = "its memory does not report them".to_owned();
                let region = region.name().clone();
                events.push(ServerEvent::Unwatched { region, why });
            }
            continue;
        };
        match file.watch(tell) {
            Ok(watch) => drop(files.insert(number, watch)),
            Err(error) => {
                let why = match error.kind() {
                    std::io::ErrorKind::WouldBlock => "another program has it open".to_owned(),
                    std::io::ErrorKind::PermissionDenied => "it belongs to another user".to_owned(),
                    _ => format!("its file system has no leases ({error})"),
                };
                let region = region.name().clone();
                events.push(ServerEvent::Unwatched { region, why });
            }
        }
    }
    files
}

impl<D: Driver> Service<D> {
    /// Handles a program that wants the file of the region with this number, or the fact that none has it any more.
    pub fn handle_wanted(&mut self, now: Duration, number: RegionId, wanted: Wanted) {
        self.now = now;
        let access = match wanted {
            Wanted::Nothing => return self.closed(number),
            Wanted::Read => Access::READ,
            Wanted::Write => Access::WRITE,
        };
        // The claim keeps nobody out: a holder that does not share with it is asked to release.
        let claim = self.local_claim(number, access, Access::all());
        self.claim(claim, Conflict::Break, Pending::Outside(number, access));
    }

    /// Lets programs have the file for which they wait, as no lease conflicts with it any more.
    pub(super) fn opened(&mut self, number: RegionId, access: Access) {
        let open = self.open.entry(number).or_default();
        *open |= access;
        // Letting one program in lets in all: a writer may wait for mappings that do not conflict with a reader.
        let waits = |pending: &Pending| matches!(pending, Pending::Outside(other, _) if *other == number);
        if self.pending.values().any(waits) {
            return;
        }
        let access = *open;
        self.driver.let_others(number);
        self.events.push(ServerEvent::Opened {
            region: self.shared.regions[number.0].name().clone(),
            write: access.contains(Access::WRITE),
        });
    }

    fn closed(&mut self, number: RegionId) {
        if self.open.remove(&number).is_some() {
            let region = self.shared.regions[number.0].name().clone();
            self.events.push(ServerEvent::Closed { region });
        }
    }

    /// Checks that a mapping does not conflict with programs that have the region's file open.
    pub(super) fn check_outside(&mut self, map: &Map) -> Result<(), Failure> {
        let Some(open) = self.open.get(&map.number) else {
            return Ok(());
        };
        if map.share.contains(*open) {
            return Ok(());
        }
        if self.driver.is_alone(map.number) {
            self.closed(map.number);
            return Ok(());
        }
        let text = format!(
            "a program of the server's host has the file of region {} open: wait until it closes the file, or map the region with sharing",
            map.region.name()
        );
        Err((ErrorCode::Busy, text))
    }
}
